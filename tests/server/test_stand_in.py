"""A server whose chunks are computed after a stand-in, all but a prompt's first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asking import REPORT, drain, outputs, prompt_of, report, scheduler
from engines import Engine, make_engine, relative_error
from vllm.v1.metrics.stats import PrefixCacheStats

from vllm_blend import Blender
from vllm_blend.core.plans import BlendPlan, ChunkIds
from vllm_blend.server.chunks.chunk_registry import chunk_key

INPUTS = Path(__file__).parents[2] / "inputs"
STAND_IN = "The ferry was built in Turku in 1931. Until the bridge was opened it carried mail\n\n"


@pytest.fixture(scope="module")
def sample() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((INPUTS / "2.json").read_text())
    return found


def logprobs(engine: Engine, prompt: list[int], field: object) -> tuple[dict[int, float], Any]:
    """Of the first token; what the server reports."""
    (output,) = outputs(engine, [prompt], [field], max_tokens=1, logprobs=20)
    found = {token: one.logprob for token, one in output.outputs[0].logprobs[0].items()}
    return found, report(output) if isinstance(field, dict) else None


def test_each_place_has_the_kv_that_suits_it(
    smollm2: Path, sample: dict[str, Any], tmp_path: Path
) -> None:
    store = {"host_gb": 0.5, "disk": {"folder": str(tmp_path), "budget_gb": 1}}
    config = {"vllm_blend": {"stand_in": STAND_IN, "store": store, "harvest": False}}
    texts = [sample[str(i)] for i in range(sample["chunk_num"])]
    with make_engine(smollm2, additional_config=config) as engine:
        drain(engine)
        state = scheduler(engine)
        own, settings = state.blend_internal, state.blend_settings.blend
        assert (settings.policy, settings.recomp_ratio) == ("ahead*static", 0.08)
        blender = Blender(engine.llm, stand_in=STAND_IN.strip())
        assert blender.settings == settings
        assert blender.contexts(2) == [*own.contexts[:2]]
        num_computed = len(texts)
        for order in (texts, texts[::-1]):
            prompt = blender.prompt(blender.chunks(order), sample["query"])
            ids, spans = prompt.token_ids, [[s.start, s.end] for s in prompt.spans[1:]]
            marked, auto = {"spans": spans} | REPORT, {"auto": True} | REPORT
            _, told = logprobs(engine, ids, marked)
            drain(engine)
            # in another order, KV for other places was better than none
            assert told["missed_chunks"] == (len(texts) if order is texts else 0)
            assert own.background.num_computed == num_computed
            expected, _ = logprobs(engine, ids, BlendPlan(prompt.spans[1:], settings))
            for field in (marked, auto):
                found, told = logprobs(engine, ids, field)
                assert (told["missed_chunks"], told["chunks"]) == (0, len(texts))
                assert found == pytest.approx(expected, abs=1e-3)
            drain(engine)
            num_computed += 2  # the first became the last, and the last the first
        assert own.background.num_computed == num_computed - 2
        assert engine.model.blending.chunks.tiers.store.flush()

    with make_engine(smollm2, additional_config=config) as engine:  # all of them are on disk
        drain(engine)
        for field in (auto, marked):
            again, told = logprobs(engine, ids, field)
            assert (told["missed_chunks"], told["chunks"]) == (0, len(texts))
            assert again == pytest.approx(expected, abs=1e-3)
        drain(engine)
        assert scheduler(engine).blend_internal.background.num_computed == 0


def test_a_context_is_computed_once(smollm2: Path) -> None:
    """The second chunk finds it in the prefix cache, and has the KV that it has without. Of the chunks
    themselves nobody finds anything there."""
    stand_in = 10 * STAND_IN
    settings = {"stand_in": stand_in, "harvest": False, "ram_gb": 0.05}
    options = dict(enable_prefix_caching=True, additional_config={"vllm_blend": settings})
    with make_engine(smollm2, **options) as engine:
        drain(engine)
        state, computed = scheduler(engine), dict[str, int]()
        own, plans, counted = state.blend_internal, dict[str, Any](), list[int]()
        schedule = state.schedule
        state.kv_cache_manager.log_stats = True

        def watched(*args: Any, **kwargs: Any) -> Any:
            state.kv_cache_manager.prefix_cache_stats = PrefixCacheStats()
            output = schedule(*args, **kwargs)
            counted.append(state.kv_cache_manager.prefix_cache_stats.queries)
            for name, count in output.num_scheduled_tokens.items():
                if own.is_mine(name):
                    computed[name] = computed.get(name, 0) + count
                    plans[name] = state.requests[name].sampling_params.extra_args["blend"]
            return output

        state.schedule = watched
        prompt, spans = prompt_of(engine, [1, 2, 3, 4], size=200)
        outputs(engine, [prompt], [{"spans": spans}], cache_salt="a tenant's", max_tokens=1)
        drain(engine)
        seen: set[tuple[int, bool]] = set()
        for name, plan in plans.items():
            if (plan.start, plan.scored) in seen:
                assert computed[name] == 200 + plan.start % state._block_size
            seen.add((plan.start, plan.scored))
        assert (len(plans), len(seen), own.background.num_computed) == (7, 3, 4)
        assert len(own.contexts.later) > state._block_size
        assert sum(counted) == len(prompt)  # of the client's request alone
        blender = Blender(engine.llm, stand_in=stand_in.strip())
        kept = engine.model.blending.chunks._chunks
        for start, end in spans[1:]:
            chunk = ChunkIds("a tenant's", tuple(prompt[start:end]), own.contexts.later)
            (alone,) = blender.obtain([(chunk.context, chunk.token_ids)])
            for found, expected in zip(kept[chunk_key(chunk)].layers, alone.kv.layers, strict=True):
                for one, other in zip(found, expected, strict=True):
                    assert relative_error(one, other) < 1e-4
        (start, end), head = spans[0], own.contexts.first
        guessed = [*head, *prompt[start:end], 5]  # what the first chunk was computed as
        assert len(guessed) > state._block_size
        (other,) = outputs(engine, [guessed], [None], max_tokens=1)
        assert other.num_cached_tokens <= len(head)
