"""What vLLM's LoRA kernels on a GPU are told of chosen rows, read from their own metadata on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.model_manager import LoRAModelManager

from vllm_blend.model.adapter_rows import with_adapters

SLOTS = [7, None, 9]
"""Which adapter each slot holds."""

OF_TOKENS = [9] * 5 + [0] * 4 + [7] * 6
OF_REQUESTS = [9, 0, 7]


@pytest.fixture
def punica(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's, whose module leaves out the class of its metadata where there is no GPU."""
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.punica_wrapper import punica_gpu

    monkeypatch.setattr(punica_gpu, "LoRAKernelMeta", LoRAKernelMeta, raising=False)
    config = SimpleNamespace(max_loras=3, specialize_active_lora=False)
    return punica_gpu.PunicaWrapperGPU(64, 8, "cpu", lora_config=config)


@pytest.fixture
def model(punica: Any) -> Any:
    """One whose manager has told the kernels of a step."""
    manager: Any = object.__new__(LoRAModelManager)
    manager.__dict__.update(
        supports_mm=False,
        lora_index_to_id=SLOTS,
        lora_config=SimpleNamespace(max_loras=3),
        capacity_=3,
        vocab_size=32,
        _classification_head=None,
        _last_mapping=None,
        _last_slot_layout=None,
        _get_punica_wrapper=lambda prefix: punica,
    )
    manager.set_adapter_mapping(LoRAMapping(tuple(OF_TOKENS), tuple(OF_REQUESTS), is_prefill=True))
    return SimpleNamespace(lora_manager=manager)


def told(punica: Any, num_rows: int) -> dict[str, Any]:
    """Adapter of each row, and the rows of each adapter, as the kernels read them."""
    mapping, order, counts, starts, active, no_lora, _ = punica.token_mapping_meta.meta_args(
        num_rows, False
    )
    rows = {}
    for index, slot in enumerate(active.tolist()):
        if counts[index]:
            rows[slot] = order[starts[index] : starts[index] + counts[index]].tolist()
    return dict(mapping=mapping.tolist(), rows=rows, none=bool(no_lora))


def slot_of(adapter: int) -> int:
    return SLOTS.index(adapter) if adapter else -1


@pytest.mark.parametrize("rows", [[0, 3, 4, 6, 9, 14], [5, 9, 10], [0], list(range(15))])
def test_kernels_are_told_of_the_rows(punica: Any, model: Any, rows: list[int]) -> None:
    before = told(punica, len(OF_TOKENS))
    seen: list[Any] = []

    def run() -> torch.Tensor:
        seen.append(told(punica, len(rows)))
        seen.append(punica.prompt_mapping_meta.meta_args(3, False)[0].tolist())
        return torch.zeros(len(rows))

    assert len(with_adapters(model, torch.tensor(rows), run)()) == len(rows)
    slots = [slot_of(OF_TOKENS[row]) for row in rows]
    of_slots = {
        slot: [index for index, one in enumerate(slots) if one == slot] for slot in sorted(set(slots))
    }
    assert seen[0] == dict(mapping=slots, rows=of_slots, none=False)
    assert seen[1] == [slot_of(adapter) for adapter in OF_REQUESTS]
    assert told(punica, len(OF_TOKENS)) == before


def test_rows_without_an_adapter_skip_the_kernels(punica: Any, model: Any) -> None:
    flags: list[bool] = []

    def run() -> torch.Tensor:
        flags.append(told(punica, 2)["none"])
        return torch.zeros(2)

    with_adapters(model, torch.tensor([5, 8]), run)()
    assert flags == [True]
    assert not told(punica, len(OF_TOKENS))["none"]


def test_the_step_is_told_again_after_a_failure(punica: Any, model: Any) -> None:
    before = told(punica, len(OF_TOKENS))

    def run() -> torch.Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        with_adapters(model, torch.tensor([0, 9]), run)()
    assert told(punica, len(OF_TOKENS)) == before
