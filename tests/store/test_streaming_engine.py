"""A real engine on KV that arrives while the step runs."""

from __future__ import annotations

import threading
from typing import Any

from chunks import same
from engines import Engine, collect, run
from tiers import FakeTier

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan
from vllm_blend.core.settings import BlendSettings
from vllm_blend.store import ChunkStore, ModelKey
from vllm_blend.store.record import Layout
from vllm_blend.store.streaming_layers import StreamingKV


def test_a_step_waits_for_its_own_layer_only(llama: Engine) -> None:
    """Every layer is released when the engine asks for it, and not before: the answer is the same."""
    model = ModelKey("tiny", "{}", llama.model.blending.kv_shape)
    chunks = [llama.ids(40, seed) for seed in range(3)]
    keys = [model.chunk(ids) for ids in chunks]
    question = llama.ids(9, 7)
    stored = collect(llama, chunks)

    def plan(kvs: list[Any]) -> tuple[list[int], BlendPlan]:
        prompt: list[int] = []
        spans = []
        for ids, kv in zip(chunks, kvs, strict=True):
            spans.append(ChunkSpan(len(prompt), kv, tuple(ids)))
            prompt += ids
        return prompt + question, BlendPlan(tuple(spans), BlendSettings(recomp_ratio=0.2))

    prompt, exact = plan(stored)
    (expected,) = run(llama, [prompt], [exact])
    tier = FakeTier()
    with ChunkStore([tier], host_bytes=1 << 24) as store:
        for key, kv in zip(keys, stored, strict=True):
            store.put(key, kv)
        assert store.flush()
        for key in keys:
            store.discard(key)
        asked = [threading.Event() for _ in range(llama.model.blending.kv_shape.num_layers)]
        layout = Layout.of(keys[0])

        def wait_until_asked(offset: int) -> None:
            if offset:
                layer = (offset - layout.preamble_bytes) // layout.layer_bytes
                assert asked[layer].wait(60)

        tier.on_read = wait_until_asked
        late = [kv for kv in store.get_many(keys, layerwise=True) if isinstance(kv, StreamingKV)]
        assert len(late) == 3
        for kv in late:
            tell(kv, asked)
        prompt, plan_late = plan(late)
        (found,) = run(llama, [prompt], [plan_late])
        assert found == expected
        for event in asked:
            event.set()
        assert store.flush()
        assert all(same(StoredKV(kv.layers.tensors), one) for kv, one in zip(late, stored, strict=True))


def tell(kv: StreamingKV, asked: list[threading.Event]) -> None:
    """Sets a layer's event, and those before it, when the layer is waited for."""
    wait = kv.layers.wait

    def waited(count: int | None = None) -> None:
        for event in asked[:count]:
            event.set()
        wait(count)

    kv.layers.wait = waited  # type: ignore[method-assign]
