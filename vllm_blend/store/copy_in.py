"""KV that was computed, copied into host memory."""

from __future__ import annotations

from typing import Any

import torch

from vllm_blend.core.kv import StoredKV
from vllm_blend.store.fp8 import Fp8Layers
from vllm_blend.store.host import Slot


def written_event(kv: StoredKV) -> Any:
    """What to wait for before KV on a GPU is read on another stream."""
    tensor = kv.described[0][0]
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def copy_to_slot(kv: StoredKV, slot: Slot, ready: Any) -> None:
    """Fills a slot of host memory, once what comes before ``ready`` is done (None: it is)."""
    if kv.scores is not None:
        slot.scores = kv.scores.detach().clone()
    stream = None
    source = kv.described[0][0].device
    if ready is not None and source.type == "cpu":
        ready.synchronize()
    elif ready is not None:
        stream = torch.cuda.Stream(source)  # beside the compute
        stream.wait_event(ready)
    with torch.cuda.stream(stream):  # None: as it is
        for index, (k, v) in enumerate(kv.layers):
            if isinstance(slot.layers, Fp8Layers):
                slot.layers.write(index, k, v)
            else:
                slot.layers[index][0].copy_(k)
                slot.layers[index][1].copy_(v)
