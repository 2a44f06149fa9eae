"""Blended requests beside vLLM's KV connectors: what moves a request's blocks moves theirs too, what
finds blocks by their tokens neither gets nor serves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kv_connectors
import pytest
from asking import REPORT, answer, drain, prompt_of, report, scheduler
from engines import Engine, collect, make_engine
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from vllm_blend.compat.kv_connectors import moves_blocks
from vllm_blend.server.config import ServerSettings
from vllm_blend.server.scheduler.kv_connectors import hide, without

POLICIES = ("static", "ahead*static")
BLENDS = {"vllm_blend": {"ram_gb": 0.05, "stand_in": "", "harvest": False}}


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    for kept in (kv_connectors.MOVED, kv_connectors.FOUND, kv_connectors.SEEN):
        kept.clear()


@contextmanager
def engine_with(folder: Path, transfer: dict[str, Any], **options: Any) -> Iterator[Engine]:
    """An engine with a KV connector and its prefix cache."""
    settings = dict(enable_prefix_caching=True, kv_transfer_config=transfer)
    with make_engine(folder, **(settings | options)) as engine:
        drain(engine)
        yield engine


def ask(
    engine: Engine,
    prompts: Sequence[list[int]],
    fields: Sequence[Any],
    transfers: Sequence[Any] | None = None,
    max_tokens: int = 8,
) -> list[Any]:
    """Answers to one batch: each prompt with its ``blend`` field and its ``kv_transfer_params``."""
    from vllm import SamplingParams

    params = []
    for field, transfer in zip(fields, transfers or [None] * len(prompts), strict=True):
        both = {"blend": field, "kv_transfer_params": transfer}
        extra = {key: value for key, value in both.items() if value is not None}
        options = dict(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        params.append(SamplingParams(**options, extra_args=extra or None))
    tokens = [{"prompt_token_ids": ids} for ids in prompts]
    found: list[Any] = engine.llm.generate(tokens, params, use_tqdm=False)
    scheduler(engine).reset_prefix_cache()
    return found


def with_known_chunks(engine: Engine, policy: str = "static") -> tuple[list[int], dict[str, Any]]:
    """A prompt whose chunks are known, and what to ask for."""
    prompt, spans = prompt_of(engine, [1, 2, 3])
    field = {"spans": spans, "policy": policy, "recomp_ratio": 0.02} | REPORT
    ask(engine, [prompt], [field], max_tokens=1)
    drain(engine)
    return prompt, field


@pytest.mark.slow
@pytest.mark.covers("KV connector that moves a request's blocks", backend="CPU_ATTN")
@pytest.mark.parametrize("policy", POLICIES)
def test_one_engine_prefills_and_another_decodes(tiny: Any, policy: str) -> None:
    """Blended and plain requests in one batch, answered as by one engine; the other one's prefix cache
    does not take blended KV for exact."""
    moves = kv_connectors.config("MovesBlocks")
    with engine_with(tiny("llama"), moves, additional_config=BLENDS) as engine:
        prompt, field = with_known_chunks(engine, policy)
        prompts = [prompt, prompt_of(engine, [4])[0]]
        (full,) = ask(engine, [prompt], [None])
        alone = [answer(output) for output in ask(engine, prompts, [field, None])]
        assert alone[0] != answer(full)  # else nothing tells blended KV from exact
        names = [{"send": "a"}, {"send": "b"}]
        sent = ask(engine, prompts, [field, None], names, max_tokens=1)
        assert report(sent[0])["reused_tokens"] == 300
        moved = [output.kv_transfer_params for output in sent]
        assert [one.get("blended", False) for one in moved] == [True, False]
    with engine_with(tiny("llama"), moves) as engine:
        found = ask(engine, prompts, [None, None], moved)
        assert [answer(output) for output in found] == alone
        assert [output.num_cached_tokens for output in found] == [316, 116]
    with engine_with(tiny("llama"), moves) as engine:
        for transfer, expected in ((moved[0], alone[0]), (None, answer(full))):
            (params,) = _params([{"kv_transfer_params": transfer}])
            (found,) = engine.llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            assert answer(found) == expected
        assert found.num_cached_tokens == 0


def _params(extra_args: Sequence[dict[str, Any]]) -> list[Any]:
    from vllm import SamplingParams

    options = dict(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    return [SamplingParams(**options, extra_args=extra) for extra in extra_args]


@pytest.mark.covers(
    "KV connector that finds blocks by tokens, beside blended requests", backend="CPU_ATTN"
)
@pytest.mark.parametrize("waits", [False, True])
def test_what_finds_blocks_by_tokens_never_sees_a_blended_request(
    tiny: Any, tmp_path: Path, waits: bool
) -> None:
    settings: dict[str, Any] = {"stand_in": "", "harvest": False}
    settings |= (
        {"store": {"host_gb": 0.05, "disk": {"folder": str(tmp_path), "budget_gb": 0.1}}}
        if waits
        else {}
    )
    finds = kv_connectors.config("FindsBlocks")
    with engine_with(tiny("llama"), finds, additional_config={"vllm_blend": settings}) as engine:
        prompt, field = with_known_chunks(engine)
        kv_connectors.FOUND.clear()  # the first time its chunks were missed: it was plain
        kv_connectors.SEEN.clear()
        (blended,) = ask(engine, [prompt], [field])
        assert report(blended)["reused_tokens"] == 300
        assert not kv_connectors.FOUND and not kv_connectors.SEEN
        (plain,) = ask(engine, [prompt], [None])
        assert answer(plain) != answer(blended)
        assert len(kv_connectors.FOUND) == 1  # of the plain one, which is exact
        (again,) = ask(engine, [prompt], [None])
        assert answer(again) == answer(plain)
        size = engine.llm.llm_engine.vllm_config.cache_config.block_size
        assert again.num_cached_tokens == 316 // size * size > 0
        # there are blocks of its tokens, but it did not ask for exact ones
        (once_more,) = ask(engine, [prompt], [field])
        assert report(once_more)["reused_tokens"] == 300
        assert len(kv_connectors.FOUND) == 1


def test_the_engines_own_requests_are_not_seen(tiny: Any) -> None:
    finds = kv_connectors.config("FindsBlocks")
    with engine_with(tiny("llama"), finds, additional_config=BLENDS) as engine:
        prompt, spans = prompt_of(engine, [1, 2, 3])
        ask(engine, [prompt], [{"spans": spans}], max_tokens=1)
        drain(engine)
        assert scheduler(engine).blend_internal.background.num_computed >= 3
        assert len(kv_connectors.FOUND) == 1


@pytest.mark.covers("vLLM's ExampleConnector, beside blended requests", backend="CPU_ATTN")
def test_vllms_example_connector(tiny: Any, tmp_path: Path) -> None:
    """It names files by the tokens of a prompt."""
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    options = dict(additional_config=BLENDS, disable_hybrid_kv_cache_manager=True)
    with engine_with(tiny("llama"), transfer, **options) as engine:
        prompt, spans = prompt_of(engine, [1, 2, 3])
        other = prompt_of(engine, [3, 2, 1])[0]
        field = {"spans": spans, "recomp_ratio": 0.02} | REPORT
        ask(engine, [other], [{"spans": spans}], max_tokens=1)  # its chunks are computed behind it
        drain(engine)
        assert len(list(tmp_path.iterdir())) == 1
        (blended,) = ask(engine, [other], [field])
        assert report(blended)["reused_tokens"] == 300
        (plain,) = ask(engine, [prompt], [None])
        assert len(list(tmp_path.iterdir())) == 2
        (again,) = ask(engine, [prompt], [None])
        assert answer(again) == answer(plain) and again.num_cached_tokens > 0


@pytest.mark.covers("vLLM's MultiConnector, beside blended requests", backend="CPU_ATTN")
def test_of_several_connectors_each_sees_what_it_may(tiny: Any) -> None:
    parts = [kv_connectors.config(name) for name in ("MovesBlocks", "FindsBlocks")]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": parts},
    }
    with engine_with(tiny("llama"), transfer, additional_config=BLENDS) as engine:
        prompt, field = with_known_chunks(engine)
        kv_connectors.FOUND.clear()
        (sent,) = ask(engine, [prompt], [field], [{"send": "a"}], max_tokens=1)
        assert report(sent)["reused_tokens"] == 300
        assert sent.kv_transfer_params["receive"] == "a" and sent.kv_transfer_params["blended"]
        assert list(kv_connectors.MOVED) == ["a"] and not kv_connectors.FOUND


def test_a_request_whose_kv_a_connector_brings_is_not_blended(tiny: Any) -> None:
    moves = kv_connectors.config("MovesBlocks")
    with engine_with(tiny("llama"), moves, additional_config=BLENDS) as engine:
        prompt, field = with_known_chunks(engine)
        (plain,) = ask(engine, [prompt], [None], [{"send": "a"}])
        (brought,) = ask(engine, [prompt], [field], [{"receive": "a"}])
        assert answer(brought) == answer(plain)
        assert report(brought)["reused_tokens"] == 0
        assert report(brought)["why_not"] == "a KV connector has its KV"
        assert not scheduler(engine).blend_plans.get(brought.request_id)


def test_the_operator_may_say_that_a_connector_moves_blocks(tiny: Any) -> None:
    settings = {"vllm_blend": BLENDS["vllm_blend"] | {"kv_block_connectors": ["FindsBlocks"]}}
    finds = kv_connectors.config("FindsBlocks")
    with engine_with(tiny("llama"), finds, additional_config=settings) as engine:
        prompt, field = with_known_chunks(engine)
        kv_connectors.FOUND.clear()
        ask(engine, [prompt], [field], max_tokens=1)
        assert len(kv_connectors.FOUND) == 1  # it is told what it is told


@pytest.mark.parametrize("names", ["NixlConnector", [1], None])
def test_names_of_connectors_are_checked(names: Any) -> None:
    with pytest.raises(ValueError, match="kv_block_connectors is .*; expected a list of class names"):
        ServerSettings.from_mapping({"kv_block_connectors": names})


def test_which_of_vllms_connectors_move_blocks() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector, offloading_connector
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as nixl

    for kind, moves in (
        (nixl.NixlPullConnector, True),
        (nixl.NixlPushConnector, True),
        (mooncake_connector.MooncakeConnector, True),
        (example_connector.ExampleConnector, False),
        (offloading_connector.OffloadingConnector, False),
    ):
        assert moves_blocks(kind.__new__(kind)) == moves


def test_scripts_need_the_scheduler_that_keeps_them_apart(tiny: Any) -> None:
    with engine_with(tiny("llama"), kv_connectors.config("MovesBlocks")) as engine:
        chunk = engine.ids(40, 1)
        with pytest.raises(ValueError, match="this engine has a KV connector, which must not see"):
            collect(engine, [chunk])


def test_a_step_without_some_of_its_requests() -> None:
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [SimpleNamespace(req_id="a"), SimpleNamespace(req_id="b")]  # type: ignore[list-item]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=["c", "d", "e"],
        resumed_req_ids={"c", "d"},
        new_token_ids=[],
        all_token_ids={"d": [1], "e": [2]},
        new_block_ids=[None, ([7],), ([8],)],
        num_computed_tokens=[1, 2, 3],
        num_output_tokens=[4, 5, 6],
    )
    output.num_scheduled_tokens = {"a": 5, "b": 6, "c": 1, "d": 2, "e": 3}
    output.total_num_scheduled_tokens = 17
    output.preempted_req_ids = {"b", "x"}
    assert without(output, {"z"}.__contains__) is output
    seen = without(output, {"b", "d"}.__contains__)
    assert [one.req_id for one in seen.scheduled_new_reqs] == ["a"]
    assert seen.num_scheduled_tokens == {"a": 5, "c": 1, "e": 3}
    assert seen.total_num_scheduled_tokens == 9 and seen.preempted_req_ids == {"x"}
    cached = seen.scheduled_cached_reqs
    assert cached == CachedRequestData(
        ["c", "e"], {"c"}, [], {"e": [2]}, [None, ([8],)], [1, 3], [4, 6]
    )
    assert output.scheduled_cached_reqs.req_ids == ["c", "d", "e"]  # the scheduler's is as it was


def test_what_a_connector_loads_over_is_not_zeroed() -> None:
    """A connector may take blocks out of those that the step zeroes."""

    class Connector:
        def get_num_new_matched_tokens(
            self, request: Any, num_computed_tokens: int
        ) -> tuple[int, bool]:
            return 0, False

        def build_connector_meta(self, scheduler_output: Any) -> None:
            scheduler_output.new_block_ids_to_zero = [2]

    connector, output = Connector(), SchedulerOutput.make_empty()
    hide(connector, {"a"}.__contains__, lambda request: None)
    output.num_scheduled_tokens, output.new_block_ids_to_zero = {"a": 1, "b": 1}, [1, 2]
    connector.build_connector_meta(output)
    assert output.new_block_ids_to_zero == [2]
