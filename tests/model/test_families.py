"""Every family that vLLM runs through its attention ops can blend, and the probe says which cannot.

A family is a row of ``helpers/families.py``. The identities here know none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engines import Engine, collect, make_engine, relative_error, run
from families import FAMILIES, family_folder
from processes import needs_compiler

from vllm_blend.attention.cpu import CPUBlendImpl
from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan, CollectPlan
from vllm_blend.core.settings import BlendSettings

MAIN = (
    *("llama", "llama3_rope", "yarn", "mistral_window", "mixtral", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "gemma2", "gemma3", "gpt_oss", "phi3", "phi", "olmo2", "granite", "granite_moe"),
    *("glm4", "cohere", "cohere2", "stablelm", "starcoder2", "smollm3", "exaone4", "seed_oss"),
)
CAN = [name for name, row in FAMILIES.items() if not row.refused]
NUM_TOKENS, START, END = 230, 3, 221


def marked(names: Any) -> list[Any]:
    """Those beside ``MAIN`` are slow in sum."""
    return [n if n in MAIN else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.fixture(scope="module", params=marked(CAN))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    row = FAMILIES[request.param]
    with make_engine(family_folder(request.param), **row.engine) as engine:
        engine.nope = row.nope  # type: ignore[attr-defined]
        yield engine


def exact_kv(engine: Engine, prompt: list[int]) -> StoredKV:
    plan = CollectPlan()
    run(engine, [prompt], [plan], max_tokens=1)
    return StoredKV(tuple(plan.kv))


@contextmanager
def on_vllms_kernel() -> Iterator[None]:
    """Rows attend by the kernel that full prefill has: what is left is the mechanism's own error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPUBlendImpl, "has_kernel", lambda impl, layer: False)
        yield


def check_identities(engine: Engine) -> None:
    """Exact KV at any rows is full prefill, by the kernel that full prefill has and, where rows have
    one of their own, by that; wrong KV is far off."""
    prompt = engine.ids(NUM_TOKENS, seed=1)
    tokens, logits = engine.run(prompt)
    kv = exact_kv(engine, prompt)

    def blended(policy: str, ratio: float, chunk: StoredKV) -> torch.Tensor:
        """Logits with exact KV; the tokens are full prefill's."""
        settings = BlendSettings(policy=policy, recomp_ratio=ratio)
        plan = BlendPlan((ChunkSpan(START, chunk),), settings)
        with engine.watched() as seen:
            (found,) = run(engine, [prompt], [plan], max_tokens=16)
        kept = int(ratio * (END - START)) + NUM_TOKENS - (END - START)
        assert len(engine.flags["imp_indices"]) == kept
        assert found == tokens
        return torch.cat(seen)

    with on_vllms_kernel():
        for case in (("random", 0.0), ("random", 0.05), ("static", 0.16), ("ahead*static", 0.5)):
            assert relative_error(blended(*case, kv.tokens(START, END)), logits) < 1e-5
    # full prefill by the rows' own kernel: of all but token 0, whose KV depends on no attention
    plan = CollectPlan(start=1, prefix=kv.tokens(0, 1))
    with engine.watched() as seen:
        (found,) = run(engine, [prompt], [plan], max_tokens=16)
    assert found == tokens
    own = StoredKV(tuple(plan.kv)).tokens(START - 1, END - 1)
    for case in (("static", 0.16), ("ahead*static", 0.5)):
        assert relative_error(blended(*case, own), torch.cat(seen)) < 1e-5
    wrong = StoredKV(tuple((k.roll(7, 0), v.roll(7, 0)) for k, v in kv.layers))
    plan = BlendPlan((ChunkSpan(START, wrong.tokens(START, END)),), BlendSettings(policy="random"))
    with engine.watched() as seen:
        run(engine, [prompt], [plan], max_tokens=1)
    assert relative_error(torch.cat(seen), logits[:1]) > 0.05


@pytest.mark.covers("rows chosen before the step", backend="CPU_ATTN", family="{engine}")
def test_exact_kv_at_any_rows_is_full_prefill(engine: Engine) -> None:
    check_identities(engine)


def test_layer_0_key_of_a_chunk_computed_alone_rotates_to_its_place(engine: Engine) -> None:
    ids, place = engine.ids(60, seed=2), 120
    prompt = engine.ids(place, seed=3) + ids
    whole = CollectPlan(as_written=True)
    run(engine, [prompt], [whole], max_tokens=1)
    (alone,) = collect(engine, [ids])
    (k, v), (k_there, v_there) = alone.layers[0], whole.kv[0]
    rotation = engine.model.blending.attns[0].impl.blend.rotation
    assert relative_error(rotation.rotate(k, torch.arange(place, place + 60)), k_there[place:]) < 1e-5
    assert relative_error(v, v_there[place:]) < 1e-5
    if not rotation.is_none:
        assert relative_error(rotation.rotate(k, torch.arange(60)), k_there[place:]) > 1e-2


def test_which_layers_have_rope(engine: Engine) -> None:
    layers = engine.model.blending.attns
    found = [index for index, attn in enumerate(layers) if attn.impl.blend.rotation.is_none]
    assert found == list(engine.nope)  # type: ignore[attr-defined]


@pytest.mark.covers("torch.compile", backend="CPU_ATTN", family="{family}")
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3_moe", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma3", "mixtral"))],
)
@needs_compiler
def test_compiled(family: str) -> None:
    with make_engine(family_folder(family), enforce_eager=False) as engine:
        check_identities(engine)


def test_policies_that_look_at_a_check_layer_need_the_loop() -> None:
    with make_engine(family_folder("gemma3")) as engine:
        prompt = engine.ids(40, seed=4)
        kv = exact_kv(engine, prompt)
        plan = BlendPlan((ChunkSpan(3, kv.tokens(3, 30)),), BlendSettings(policy="hkvd"))
        with pytest.raises(
            ValueError, match="policy is 'hkvd', which looks at a check layer; Gemma3ForCausalLM"
        ):
            run(engine, [prompt], [plan])
