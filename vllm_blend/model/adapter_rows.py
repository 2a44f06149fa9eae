"""LoRA's kernels on chosen rows.

vLLM tells them before a step which adapter each of its tokens has. Where the model runs on some of the
rows, they must be told of those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch


def with_adapters(
    model: Any, rows: torch.Tensor, run: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """``run``, in which the adapters of ``model`` are those of some rows of the step.

    Args:
        model: vLLM's; its ``lora_manager`` is there in engines with LoRA.
        rows: ascending, ``[num_rows]``.
        run: the model's forward of the rows.
    """
    manager = getattr(model, "lora_manager", None)
    if manager is None:
        return run

    def run_with_adapters() -> torch.Tensor:
        of_step = manager._last_mapping
        adapters = tuple(of_step.index_mapping[row] for row in rows.tolist())
        manager._set_adapter_mapping(replace(of_step, index_mapping=adapters))
        try:
            return run()
        finally:
            manager._set_adapter_mapping(of_step)

    return run_with_adapters
