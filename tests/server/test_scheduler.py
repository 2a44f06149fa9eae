"""A blending engine in process: lookups, prefix cache, batches, aborts, the probe at its start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import REPORT, answer, drain, key_of, outputs, prompt_of, report, scheduler
from engines import Engine, make_engine
from vllm.exceptions import VLLMValidationError

from vllm_blend.attention.cpu import CPUBlendImpl
from vllm_blend.core.cache_fuse_metadata import CacheFuseMetadata
from vllm_blend.core.stage_clock import StageClock
from vllm_blend.model import probe
from vllm_blend.model.active_rows import ActiveRows
from vllm_blend.model.probe import Probing
from vllm_blend.plugin.worker_messages import add_events
from vllm_blend.server.internal import background_prefill
from vllm_blend.server.messages import WorkerEvents
from vllm_blend.server.request import SIZES


@pytest.fixture(scope="module")
def server(tiny: Any) -> Iterator[Engine]:
    """An engine started to blend."""
    with make_engine(
        tiny("llama"),
        enable_prefix_caching=True,
        additional_config={"vllm_blend": {"ram_gb": 0.01, "harvest": False}},
    ) as engine:
        drain(engine)
        yield engine


def test_missed_chunks_are_served_by_full_prefill_and_known_next_time(server: Engine) -> None:
    prompt, spans = prompt_of(server, [1, 2, 3])
    plain = answer(*outputs(server, [prompt], [None]))
    scheduler(server).reset_prefix_cache()
    (first,) = outputs(server, [prompt], [{"spans": spans} | REPORT])
    assert answer(first) == plain
    assert (report(first)["missed_chunks"], report(first)["reused_tokens"]) == (3, 0)
    drain(server)
    scheduler(server).reset_prefix_cache()
    (second,) = outputs(server, [prompt], [{"spans": spans, "recomp_ratio": 1.0} | REPORT])
    assert (report(second)["missed_chunks"], report(second)["reused_tokens"]) == (0, 300)
    assert answer(second) == plain
    (low,) = outputs(server, [prompt], [{"spans": spans, "recomp_ratio": 0.0} | REPORT])
    assert report(low)["recomputed_tokens"] == 0
    other, places = prompt_of(server, [3, 1], head=50)  # other places, another order
    (moved,) = outputs(server, [other], [{"spans": places} | REPORT])
    assert report(moved)["reused_tokens"] == 200


def test_stages_are_timed_for_those_who_ask(server: Engine) -> None:
    prompt, spans = prompt_of(server, [1, 2, 3])
    outputs(server, [prompt], [{"spans": spans}])
    drain(server)
    scheduler(server).reset_prefix_cache()
    start = time.perf_counter()
    found = outputs(server, [prompt, prompt[:-1] + [7]], [{"spans": spans} | REPORT] * 2)
    took = time.perf_counter() - start
    reports = [report(output) for output in found]
    for stage in ("lookup", "load", "select", "fuse"):
        assert all(r[f"{stage}_seconds"] > 0 for r in reports)
        # a step's time is divided among its requests
        assert sum(r[f"{stage}_seconds"] for r in reports) < took


def test_nothing_is_timed_where_nobody_looks(server: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, spans = prompt_of(server, [1, 2, 3])
    marks: list[StageClock] = []
    stock = StageClock._mark
    monkeypatch.setattr(StageClock, "_mark", lambda clock: marks.append(clock) or stock(clock))
    assert not scheduler(server).log_stats  # else the metrics would ask for all
    for field in ({}, REPORT):
        scheduler(server).reset_prefix_cache()
        marks.clear()
        outputs(server, [prompt], [{"spans": spans} | field])
        assert bool(marks) == bool(field)
    assert not server.model.blending.clocks


def test_news_come_with_outputs_that_vllm_waits_for_later() -> None:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput

    class Later(AsyncModelRunnerOutput):
        def get_output(self) -> Any:
            ended.append(True)
            return EMPTY_MODEL_RUNNER_OUTPUT

    def news() -> WorkerEvents:
        assert ended  # on a GPU events can be read only then
        return WorkerEvents(seconds={"a": {"fuse": 1.0}})

    ended: list[bool] = []
    output = add_events(Later(), news)
    assert not ended
    assert WorkerEvents.of(output.get_output()).seconds == {"a": {"fuse": 1.0}}
    assert WorkerEvents.of(EMPTY_MODEL_RUNNER_OUTPUT) == WorkerEvents()


def test_the_plan_is_the_one_of_the_friendly_door(server: Engine) -> None:
    """The same chunks, collected by hand and blended through a plan object."""
    from engines import collect

    from vllm_blend.core.plans import BlendPlan, ChunkSpan
    from vllm_blend.core.settings import BlendSettings

    prompt, spans = prompt_of(server, [1, 2, 3])
    chunks = [prompt[start:end] for start, end in spans]
    kvs = collect(server, chunks)
    settings = BlendSettings(recomp_ratio=0.3)
    plan = BlendPlan(
        tuple(ChunkSpan(span[0], kv) for span, kv in zip(spans, kvs, strict=True)), settings
    )
    scheduler(server).reset_prefix_cache()
    outputs(server, [prompt], [{"spans": spans}])
    drain(server)
    scheduler(server).reset_prefix_cache()
    (by_hand,) = outputs(server, [prompt], [plan])
    (by_field,) = outputs(server, [prompt], [{"spans": spans, "recomp_ratio": 0.3} | REPORT])
    assert report(by_field)["reused_tokens"] == 300
    assert answer(by_field) == answer(by_hand)


@pytest.mark.covers("prefix caching", backend="CPU_ATTN", family="llama")
def test_exact_and_approximate_blocks_do_not_mix(server: Engine) -> None:
    block = scheduler(server)._block_size
    prompt, spans = prompt_of(server, [4, 5, 6], head=block + 40)
    prompt += server.ids(block, 97)  # so that all chunks lie in full blocks
    field = {"spans": spans, "recomp_ratio": 0.1} | REPORT
    outputs(server, [prompt], [field])
    drain(server)
    scheduler(server).reset_prefix_cache()
    plain = outputs(server, [prompt], [None])[0]
    scheduler(server).reset_prefix_cache()

    first, again = (outputs(server, [prompt], [field])[0] for _ in range(2))
    whole = (len(prompt) - 1) // block * block
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, whole)  # its own blocks
    assert answer(again) == answer(first)
    exact = outputs(server, [prompt], [None])[0]
    # the exact request finds the blocks before the first chunk, which are exact, and no other
    assert exact.num_cached_tokens == spans[0][0] // block * block == block
    assert answer(exact) == answer(plain)
    other_ratio = outputs(server, [prompt], [field | {"recomp_ratio": 0.5}])[0]
    assert other_ratio.num_cached_tokens == whole  # exact blocks come first
    assert answer(other_ratio) == answer(plain)
    last = outputs(server, [prompt], [field])[0]
    assert last.num_cached_tokens == whole
    assert answer(last) == answer(plain)


def test_tenants_do_not_share(server: Engine) -> None:
    """A tenant is what a gateway says it is, by the cache salt, not what a request says."""
    prompt, spans = prompt_of(server, [7])
    outputs(server, [prompt], [{"spans": spans}], cache_salt="a")
    drain(server)
    for salt, reused in (("a", 100), ("b", 0), (None, 0)):
        (found,) = outputs(server, [prompt], [{"spans": spans} | REPORT], cache_salt=salt)
        assert report(found)["reused_tokens"] == reused, salt
    with pytest.raises(VLLMValidationError, match="key 'tenant', which this server's client_fields"):
        outputs(server, [prompt], [{"spans": spans, "tenant": "a"} | REPORT], cache_salt="b")


def test_every_answer_tells_whether_it_was_blended(server: Engine) -> None:
    prompt, spans = prompt_of(server, [8])

    def told(field: Any) -> Any:
        scheduler(server).reset_prefix_cache()
        return outputs(server, [prompt], [field], max_tokens=3)[0].kv_transfer_params

    assert told({"spans": spans}) is None  # computed in full: nothing to tell
    drain(server)
    assert told({"spans": spans, "recomp_ratio": 0.1}) == {
        "blend": {"reused_tokens": 100, "recomputed_tokens": 10}
    }
    assert told(None) is None
    asked = told({"spans": spans} | REPORT)["blend"]
    assert asked["reused_tokens"] == 100
    assert not SIZES & asked.keys()  # what others have stored is none of a client's business
    assert told(REPORT)["blend"]["why_not"] == "no chunk in the prompt"


def test_known_chunks_are_found_anywhere(server: Engine) -> None:
    prompt, spans = prompt_of(server, [11, 12])
    outputs(server, [prompt], [{"spans": spans}])
    drain(server)
    scheduler(server).reset_prefix_cache()
    piece = prompt[spans[1][0] + 9 : spans[1][1] - 4]
    other = (
        server.ids(31, 77) + piece + server.ids(20, 78) + prompt[slice(*spans[0])] + server.ids(9, 79)
    )
    (plain,) = outputs(server, [other], [None])
    scheduler(server).reset_prefix_cache()
    (found,) = outputs(server, [other], [{"auto": True, "recomp_ratio": 1.0} | REPORT])
    assert report(found)["reused_tokens"] == len(piece) + 100
    assert answer(found) == answer(plain)
    whole = prompt[slice(*spans[0])]  # a prompt that is a chunk: its last token is computed
    (only,) = outputs(server, [server.ids(3, 5) + whole], ["auto"])
    assert len(answer(only)) == 8


def test_text_that_comes_back_elsewhere_becomes_a_chunk(server: Engine) -> None:
    document = server.ids(90, 21)
    for seed in (30, 31):
        outputs(server, [server.ids(10, seed) + document + server.ids(10, seed + 50)], ["auto"])
    drain(server)
    prompt = server.ids(25, 32) + document + server.ids(10, 82)
    (found,) = outputs(server, [prompt], [{"auto": True} | REPORT])
    assert report(found)["reused_tokens"] == 90


@pytest.mark.covers("server: chunks by request", backend="CPU_ATTN", family="llama")
def test_blended_plain_and_missed_in_one_batch(server: Engine) -> None:
    prompts, fields = [], []
    for index in range(6):
        prompt, spans = prompt_of(server, [40 + index, 41 + index], head=5 + index)
        prompts.append(prompt)
        fields.append(None if index % 3 == 2 else {"spans": spans} | REPORT)
    outputs(server, prompts, fields)
    drain(server)
    scheduler(server).reset_prefix_cache()
    alone = []
    for prompt, field in zip(prompts, fields, strict=True):
        alone.append(answer(*outputs(server, [prompt], [field])))
        scheduler(server).reset_prefix_cache()
    together = outputs(server, prompts, fields)
    assert [answer(output) for output in together] == alone
    assert [report(o)["reused_tokens"] for o, f in zip(together, fields, strict=True) if f] == [200] * 4


def test_a_chunk_that_is_not_there_is_computed_and_collected_again(server: Engine) -> None:
    state = scheduler(server)
    block = state._block_size
    prompt, spans = prompt_of(server, [201, 202, 203], head=block + 40)
    prompt += server.ids(block, 97)
    field = {"spans": spans, "recomp_ratio": 0.2} | REPORT
    outputs(server, [prompt], [field])
    drain(server)
    state.reset_prefix_cache()
    (whole,) = outputs(server, [prompt], [field])
    state.reset_prefix_cache()
    (without,) = outputs(server, [prompt], [field | {"spans": [spans[0], spans[2]]}])
    state.reset_prefix_cache()

    key = key_of(server, prompt, spans[1])
    server.model.blending.chunks.drop([key])
    (found,) = outputs(server, [prompt], [field], logprobs=1)
    told = report(found)
    assert answer(found) == answer(without)
    # too much is new for a question: twice the ratio, by scores
    assert (told["reused_tokens"], told["recomputed_tokens"]) == (200, 80)
    assert (told["chunks"], told["missed_chunks"], told["lost_chunks"]) == (2, 1, {"gone": 1})
    assert told["why_not"] == ""
    drain(server)
    assert state.blend_chunks.num_pinned == 0
    # what it computed is no other's: not the same plan's, which has the chunk again, nor an exact one's
    (again,) = outputs(server, [prompt], [field])
    assert again.num_cached_tokens == spans[0][0] // block * block
    assert report(again)["reused_tokens"] == 300
    assert answer(again) == answer(whole)
    (exact,) = outputs(server, [prompt], [None])
    assert exact.num_cached_tokens == spans[0][0] // block * block


def test_without_any_of_its_chunks_a_request_is_a_full_prefill(server: Engine) -> None:
    state = scheduler(server)
    prompt, spans = prompt_of(server, [211, 212])
    outputs(server, [prompt], [{"spans": spans}])
    drain(server)
    state.reset_prefix_cache()
    (plain,) = outputs(server, [prompt], [None])
    state.reset_prefix_cache()
    server.model.blending.chunks.drop([key_of(server, prompt, span) for span in spans])
    other = server.ids(5, 96) + prompt[5:]
    both = outputs(server, [prompt, other], [{"spans": spans} | REPORT] * 2)
    assert answer(both[0]) == answer(plain)
    for output in both:
        told = report(output)
        assert (told["reused_tokens"], told["lost_chunks"]) == (0, {"gone": 2})
        assert told["why_not"] == "its chunks were lost"
    drain(server)
    assert not len(state.blend_plans)
    assert report(*outputs(server, [prompt], [{"spans": spans} | REPORT]))["reused_tokens"] == 200


def test_a_chunk_lost_under_cached_blocks_is_collected_again(server: Engine) -> None:
    """Its tokens come from the prefix cache, by the request's own earlier blocks."""
    state = scheduler(server)
    prompt, spans = prompt_of(server, [221, 222])
    prompt += server.ids(state._block_size, 97)  # so that all chunks lie in full blocks
    field = {"spans": spans} | REPORT
    outputs(server, [prompt], [field])
    drain(server)
    state.reset_prefix_cache()
    _, cached = (outputs(server, [prompt], [field])[0] for _ in range(2))
    server.model.blending.chunks.drop([key_of(server, prompt, spans[0])])
    (again,) = outputs(server, [prompt], [field])
    assert answer(again) == answer(cached)
    assert again.num_cached_tokens >= spans[-1][1]
    assert report(again)["lost_chunks"] == {}
    drain(server)
    assert len(server.model.blending.chunks) >= len(state.blend_chunks)


def test_several_answers_and_logprobs(server: Engine) -> None:
    prompt, spans = prompt_of(server, [51, 52])
    outputs(server, [prompt], [{"spans": spans}])
    drain(server)
    (found,) = outputs(
        server, [prompt], [{"spans": spans} | REPORT], n=3, temperature=1.0, seed=1, logprobs=2
    )
    assert len({tuple(completion.token_ids) for completion in found.outputs}) > 1
    assert all(len(completion.logprobs) == 8 for completion in found.outputs)


def test_requests_wait_for_no_more_of_a_chunk_than_a_window(
    server: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that an idle engine computes stands back for a request; its KV is the same."""
    from vllm import SamplingParams

    engine, state = server.llm.llm_engine, scheduler(server)
    background = state.blend_internal.background
    monkeypatch.setattr(background_prefill, "GAP_S", 0.0)
    monkeypatch.setattr(background, "took", lambda *_: None)  # windows of a size
    monkeypatch.setattr(background, "window", 300)
    monkeypatch.setattr(background, "share", 0.01)
    prompt, spans = prompt_of(server, [71], size=900)
    plain = answer(*outputs(server, [prompt], [None]))
    outputs(server, [prompt], [{"spans": spans}])  # missed

    def step() -> int:
        """Tokens of the chunk that are computed."""
        engine.step()
        (found,) = (r for name, r in state.requests.items() if background.is_mine(name))
        return int(found.num_computed_tokens)

    assert [step(), step()] == [300, 600]
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    engine.add_request("short", {"prompt_token_ids": server.ids(20, 72)}, short)
    (request,) = (r for name, r in state.requests.items() if name.startswith("short"))
    assert [step() for _ in range(3)] == [600] * 3
    assert len(request.output_token_ids) == 3
    background.credit = 0.0
    background.share = 1000.0  # what the next step earns is enough for the rest
    assert step() == 600
    longer = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    engine.add_request("longer", {"prompt_token_ids": server.ids(20, 73)}, longer)
    engine.step()
    assert key_of(server, prompt, spans[0]) in state.blend_chunks
    while engine.has_unfinished_requests():
        engine.step()
    drain(server)
    state.reset_prefix_cache()
    (found,) = outputs(server, [prompt], [{"spans": spans, "recomp_ratio": 1.0} | REPORT])
    assert (report(found)["reused_tokens"], answer(found)) == (900, plain)


def test_a_chunk_does_not_hold_the_blocks_that_a_request_waits_for(
    server: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = scheduler(server)
    background, pool = state.blend_internal.background, state.kv_cache_manager.block_pool
    monkeypatch.setattr(background_prefill, "GAP_S", 0.0)
    monkeypatch.setattr(background, "took", lambda *_: None)
    monkeypatch.setattr(background, "window", 300)
    monkeypatch.setattr(background, "share", 0.0)
    prompt, spans = prompt_of(server, [74], size=900)
    outputs(server, [prompt], [{"spans": spans}])
    server.llm.llm_engine.step()
    assert background.num_running == 1
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 700 // state._block_size)
    try:  # room for the rest of the chunk, not for the request beside it
        (found,) = outputs(server, [server.ids(1000, 75)], [None])
    finally:
        pool.free_blocks(taken)
    assert len(answer(found)) == 8
    assert key_of(server, prompt, spans[0]) in state.blend_chunks


def test_what_a_prompt_reuses_earns_nothing_for_missed_chunks(
    server: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their share is one of what is computed."""
    prompt, spans = prompt_of(server, [1, 2, 3])
    outputs(server, [prompt], [{"spans": spans}])
    drain(server)
    earned: list[int] = []
    monkeypatch.setattr(scheduler(server).blend_internal.background, "earn", earned.append)
    for field, rows in (
        (None, len(prompt)),
        ({"spans": spans, "recomp_ratio": 0.1}, len(prompt) - 270),
    ):
        scheduler(server).reset_prefix_cache()
        earned.clear()
        outputs(server, [prompt], [field], max_tokens=4)
        assert sum(earned) == rows + 3


def test_memory_is_bounded_and_nothing_stays_behind(server: Engine) -> None:
    """More chunks than fit, some aborted: counts of blocks, pins and bytes come back."""
    engine = server.llm.llm_engine
    state = scheduler(server)
    pool = state.kv_cache_manager.block_pool
    drain(server)
    state.reset_prefix_cache()
    free = pool.get_num_free_blocks()
    capacity = state.blend_chunks.max_tokens
    from vllm import SamplingParams

    for index in range(60):
        prompt, spans = prompt_of(server, [100 + index % 50, 101 + index % 50], size=90)
        params = SamplingParams(
            temperature=0, max_tokens=6, detokenize=False, extra_args={"blend": {"spans": spans}}
        )
        engine.add_request(f"storm-{index}", {"prompt_token_ids": prompt}, params)
        engine.step()
        if index % 3 == 0:
            engine.abort_request([f"storm-{index}"])
        assert state.blend_chunks.num_tokens <= capacity
    while engine.has_unfinished_requests():
        engine.step()
    drain(server)
    assert pool.get_num_free_blocks() == free
    assert state.blend_chunks.num_pinned == 0
    assert not len(state.blend_reports)
    assert not len(state.blend_plans)
    assert len(state.blend_internal.background) == 0
    assert state.blend_chunks.num_evicted > 0
    assert (
        len(server.model.blending.chunks)
        <= len(state.blend_chunks) + len(state.blend_chunks._to_drop) + 1
    )


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_preempted_requests_answer_as_alone(server: Engine, ratio: float) -> None:
    prompts, fields = [], []
    for index in range(4):
        prompt, spans = prompt_of(server, [60 + index, 70 + index])
        prompts.append(prompt)
        fields.append({"spans": spans, "recomp_ratio": ratio} | REPORT)
    outputs(server, prompts, fields)
    drain(server)
    state = scheduler(server)
    alone = []
    for prompt, field in zip(prompts, fields, strict=True):
        state.reset_prefix_cache()
        alone.append(answer(*outputs(server, [prompt], [field], max_tokens=20)))
    state.reset_prefix_cache()
    stock, count = state.schedule, [0]

    def preempting(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] in (4, 9, 13) and state.running:
            request = state.running.pop()
            state._preempt_request(request, 0.0)
        return stock(*args, **kwargs)

    state.schedule = preempting
    try:
        together = outputs(server, prompts, fields, max_tokens=20)
    finally:
        del state.schedule
    assert count[0] > 13
    assert [report(output)["reused_tokens"] for output in together] == [200] * 4
    assert [answer(output) for output in together] == alone


@contextmanager
def steps_of(server: Engine, budget: int, seats: int) -> Iterator[None]:
    """At most ``budget`` tokens and ``seats`` requests a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler(server), "max_num_scheduled_tokens", budget)
        for name in ("max_num_running_reqs", "max_num_active_reqs"):
            patch.setattr(scheduler(server), name, seats)
        yield


@pytest.mark.parametrize("budget", [330, 500, 700, 130])
def test_what_else_a_step_holds_does_not_change_the_choice(
    server: Engine, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """Blended prompts beside plain ones and their like; the last budget holds none of them whole."""
    prompts: list[list[int]] = []
    fields: list[Any] = []
    for index in range(4):
        prompt, spans = prompt_of(server, [40 + index, 50 + index, 41 + index])
        prompts += [prompt, server.ids(61 + index, 30 + index), prompt]
        blended = {"spans": spans, "recomp_ratio": 0.16} | REPORT
        fields += [blended, None, blended]
    outputs(server, prompts, fields)
    drain(server)
    chosen: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}  # by chunks and the window's start
    stock = ActiveRows.shrink

    def shrink(frame: ActiveRows, kept: dict[Any, torch.Tensor]) -> torch.Tensor:
        for request, index in kept.items():
            chunks = tuple(span.kv.layers[0][0].data_ptr() for span in request.plan.spans)
            chosen.setdefault((chunks, request.position), set()).add(tuple(index.tolist()))
        return stock(frame, kept)

    monkeypatch.setattr(ActiveRows, "shrink", shrink)
    state = scheduler(server)
    alone = []
    with steps_of(server, budget, seats=6):
        for prompt, field in zip(prompts, fields, strict=True):
            state.reset_prefix_cache()
            alone.append(answer(*outputs(server, [prompt], [field])))
        state.reset_prefix_cache()
        together = outputs(server, prompts, fields)
    assert [answer(output) for output in together] == alone
    assert len(chosen) == (4 if budget > 130 else 12)
    assert all(len(choices) == 1 for choices in chosen.values())


@pytest.mark.parametrize("policy", [None, "static", "hkvd"])
@pytest.mark.parametrize("budget", [330, 96])
def test_a_report_names_the_rows_that_were_recomputed(
    server: Engine, monkeypatch: pytest.MonkeyPatch, policy: str | None, budget: int
) -> None:
    """Those of one window, and of several: what the model's own results say of each step."""
    prompt, spans = prompt_of(server, [71, 72, 73])
    other, places = prompt_of(server, [74, 75])
    chosen = {"recomp_ratio": 0.16} | ({"policy": policy} if policy else {})
    fields: list[Any] = [{"spans": each} | chosen for each in (spans, places)]
    outputs(server, [prompt, other], fields)
    drain(server)
    state, computed = scheduler(server), set[int]()
    stock = CacheFuseMetadata.record

    def record(flags: CacheFuseMetadata, results: Any) -> None:
        stock(flags, results)
        computed.update(flags["imp_indices"].tolist())

    with steps_of(server, budget, state.max_num_running_reqs):
        state.reset_prefix_cache()
        with monkeypatch.context() as patch:
            patch.setattr(CacheFuseMetadata, "record", record)
            (found,) = outputs(server, [prompt], [fields[0] | REPORT])
        told = report(found)
        rows = [at for start, end in told["recomputed_spans"] for at in range(start, end)]
        assert told["spans"] == [[*span, "reused"] for span in spans]
        reused = {at for span in spans for at in range(*span)}
        assert set(rows) == computed & reused and rows == sorted(set(rows))
        assert len(rows) == told["recomputed_tokens"] > 0
        assert computed - reused  # the question's too
        assert all(end < start for (_, end), (start, _) in pairwise(told["recomputed_spans"]))

        state.reset_prefix_cache()
        both = outputs(server, [prompt, other], [field | REPORT for field in fields])
        assert report(both[0])["recomputed_spans"] == told["recomputed_spans"]
        for start, end in report(both[1])["recomputed_spans"]:
            assert any(first <= start < end <= last for first, last in places)


def test_rows_are_named_for_those_who_ask(server: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, spans = prompt_of(server, [76, 77])
    events: list[Any] = []
    stock = scheduler(server).blend_reports.blended
    monkeypatch.setattr(
        scheduler(server).blend_reports, "blended", lambda done: events.append(done) or stock(done)
    )
    outputs(server, [prompt], [{"spans": spans}])
    drain(server)
    for field in ({}, REPORT):
        scheduler(server).reset_prefix_cache()
        events.clear()
        (found,) = outputs(server, [prompt], [{"spans": spans} | field])
        assert bool(events[0].recomputed_spans) == ("recomputed_spans" in report(found)) == bool(field)
    # nothing of a prompt that is computed in full
    (plain,) = outputs(server, [server.ids(40, 78)], [REPORT])
    assert report(plain)["recomputed_spans"] == []


@pytest.mark.parametrize("budget", [37, 96, 160])
def test_windows_of_a_chunked_prefill_with_exact_kv(server: Engine, budget: int) -> None:
    """The first chunk, right behind an empty context, has exact KV: any window gives full prefill."""
    chunk, question = server.ids(200, 91), server.ids(20, 92)
    prompt = chunk + question
    outputs(server, [prompt], [{"spans": [[0, 200]]}])
    drain(server)
    state = scheduler(server)
    state.reset_prefix_cache()
    (plain,) = outputs(server, [prompt], [None])
    state.reset_prefix_cache()
    with steps_of(server, budget, state.max_num_running_reqs):
        (found,) = outputs(server, [prompt], [{"spans": [[0, 200]]} | REPORT])
    assert report(found)["reused_tokens"] == 200
    assert answer(found) == answer(plain)


def test_bad_fields_are_refused_and_the_engine_serves_on(server: Engine) -> None:
    prompt, spans = prompt_of(server, [1])
    for field in ({"spans": [[0, len(prompt)]]}, {"spans": [[5, 5]]}, {"check_layers": [5]}, "soon"):
        with pytest.raises(VLLMValidationError, match="spans|check_layers|blend"):
            outputs(server, [prompt], [field])
    with pytest.raises(VLLMValidationError, match="prompt_logprobs"):
        outputs(server, [prompt], ["auto"], prompt_logprobs=1)
    assert answer(*outputs(server, [prompt], [None], prompt_logprobs=1))
    assert answer(*outputs(server, [prompt], ["off"]))


def test_an_engine_whose_blends_are_wrong_does_not_start(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = CPUBlendImpl.fuse

    def wrong(self: Any, layer: Any, kv_cache: torch.Tensor, fusion: Any) -> None:
        from dataclasses import replace

        stock(self, layer, kv_cache, replace(fusion, positions=fusion.positions + 1))

    monkeypatch.setattr(CPUBlendImpl, "fuse", wrong)
    monkeypatch.setattr(probe, "verdict_path", lambda blending: tmp_path / "none")
    sentence = "asks for vllm_blend, but .* with exact KV and random rows its last hidden state is off"
    with (
        pytest.raises(ValueError, match=sentence),
        make_engine(tiny("qwen2"), additional_config={"vllm_blend": {}}),
    ):
        pass


def test_without_the_setting_a_field_is_refused(llama: Engine) -> None:
    with pytest.raises(VLLMValidationError, match="additional-config"):
        outputs(llama, [[5, 6, 7]], ["auto"])


@pytest.mark.parametrize("family", ["llama3_rope", "mistral", "mistral_window", "qwen2", "qwen3"])
def test_every_family_is_probed_at_its_start_once(
    tiny: Any, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "verdict_path", lambda blending: tmp_path / "verdict")
    found = []
    stock = Probing.run
    monkeypatch.setattr(Probing, "run", lambda probing: found.append(stock(probing)) or found[-1])
    for _ in range(2):
        config = {"vllm_blend": {}}
        with make_engine(tiny(family), additional_config=config, max_model_len=120) as engine:
            assert not any(attn.impl.blend.rotation.is_none for attn in engine.model.blending.attns)
    (verdict,) = found  # the second start reads it
    assert verdict.refused == ""
    assert verdict.identity_error < 1e-4 < 0.05 < verdict.control_error


def test_a_chunk_that_no_memory_holds_is_not_waited_for(tiny: Any) -> None:
    config = {"vllm_blend": {"ram_gb": 0.001, "stand_in": ""}}
    with make_engine(tiny("llama"), additional_config=config) as engine:
        largest = 390
        prompt = engine.ids(largest + 20, 88)
        large = [2, largest + 3]
        (found,) = outputs(engine, [prompt], [{"spans": [large]} | REPORT])
        told = f"chunks are larger than the memory for them, {largest} tokens (ram_gb)"
        assert (report(found)["why_not"], report(found)["missed_chunks"]) == (told, 0)
        beside = [[0, 2 + 100], [102, 3 + 102 + largest]]
        prompt = engine.ids(largest + 200, 89)
        (some,) = outputs(engine, [prompt], [{"spans": beside} | REPORT])
        assert report(some)["missed_chunks"] == 1
