"""KV that is kept from the prefills of requests: reused from the second one on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from asking import REPORT, answer, cutting_engine, drain, outputs, prompt_of, report, scheduler
from engines import Engine, make_engine
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.core.plans import ChunkIds
from vllm_blend.server.chunks.chunk_contexts import HARVESTED, HARVESTED_FIRST
from vllm_blend.server.chunks.token_index import Run
from vllm_blend.server.scheduler import tier_fetches, waiting
from vllm_blend.server.scheduler.lookup import apart

STEP = 150
"""Tokens that a step of the second engine computes."""


@pytest.fixture(scope="module")
def server(tiny: Any) -> Iterator[Engine]:
    settings = {"ram_gb": 0.01, "background_share": 0}
    with make_engine(
        tiny("llama"), enable_prefix_caching=True, additional_config={"vllm_blend": settings}
    ) as engine:
        drain(engine)
        yield engine


@pytest.fixture(scope="module")
def cut(tiny: Any) -> Iterator[Engine]:
    """One whose prefills are cut."""
    with cutting_engine(tiny("llama"), STEP, ram_gb=0.01) as engine:
        yield engine


def same(found: Any, plain: Any) -> bool:
    """Whether two answers are the same, and what the model gave their tokens."""
    pairs = zip(found.outputs[0].logprobs, plain.outputs[0].logprobs, strict=True)
    apart = [abs(a[token].logprob - b[token].logprob) for a, b in pairs for token in a if token in b]
    return answer(found) == answer(plain) and max(apart) < 1e-4


def known(engine: Engine, prompt: list[int], span: list[int], context: tuple[int, ...]) -> bool:
    chunk = ChunkIds("", tuple(prompt[slice(*span)]), context)
    return scheduler(engine).blend_chunks.get(chunk) is not None


@pytest.mark.covers("server: chunks kept from requests (harvest)", backend="CPU_ATTN", family="llama")
@pytest.mark.parametrize("engine", ["server", "cut"])
def test_the_second_request_reuses_what_the_first_computed(
    engine: str, request: pytest.FixtureRequest
) -> None:
    """In the same prompt it is exact: nothing needs to be computed again."""
    server: Engine = request.getfixturevalue(engine)
    prompt, spans = prompt_of(server, [1, 2, 3])
    scheduler(server).reset_prefix_cache()
    (plain,) = outputs(server, [prompt], [None])
    scheduler(server).reset_prefix_cache()
    (first,) = outputs(server, [prompt], [{"spans": spans} | REPORT])
    assert answer(first) == answer(plain)
    assert (report(first)["missed_chunks"], report(first)["reused_tokens"]) == (3, 0)
    scheduler(server).reset_prefix_cache()
    again = prompt[:-12] + server.ids(12, 97)
    field = {"spans": spans, "recomp_ratio": 0.0} | REPORT
    (second,) = outputs(server, [again], [field], logprobs=3)
    assert (report(second)["reused_tokens"], report(second)["harvested_chunks"]) == (300, 3)
    scheduler(server).reset_prefix_cache()
    assert same(second, outputs(server, [again], [None], logprobs=3)[0])
    assert known(server, prompt, spans[0], HARVESTED_FIRST)
    assert known(server, prompt, spans[1], HARVESTED)


def test_a_chunk_that_a_blended_prompt_computes_is_kept_too(server: Engine) -> None:
    prompt, spans = prompt_of(server, [11, 12])
    outputs(server, [prompt], [{"spans": spans}])
    mixed, places = prompt_of(server, [12, 13, 11, 14], head=9)
    (found,) = outputs(server, [mixed], [{"spans": places} | REPORT])
    assert (report(found)["missed_chunks"], report(found)["reused_tokens"]) == (2, 200)
    last, ends = prompt_of(server, [15, 13, 14], head=3)
    field = {"spans": ends, "recomp_ratio": 1.0} | REPORT
    (found,) = outputs(server, [last], [field], logprobs=3)
    assert (report(found)["missed_chunks"], report(found)["reused_tokens"]) == (1, 200)
    scheduler(server).reset_prefix_cache()
    assert same(found, outputs(server, [last], [None], logprobs=3)[0])


def test_kv_from_a_blend_without_approximation_is_exact(server: Engine) -> None:
    """Rows behind chunks that are all recomputed, whose own KV is kept, and reused as it is."""
    prompt, spans = prompt_of(server, [21, 22])
    outputs(server, [prompt], [{"spans": spans}])
    longer, places = prompt_of(server, [21, 22, 23], head=8)
    outputs(server, [longer], [{"spans": places, "recomp_ratio": 1.0}])
    scheduler(server).reset_prefix_cache()
    field = {"spans": places[2:], "recomp_ratio": 0.0} | REPORT
    again = longer[:-12] + server.ids(12, 96)
    (found,) = outputs(server, [again], [field], logprobs=3)
    assert report(found)["harvested_chunks"] == 1
    scheduler(server).reset_prefix_cache()
    assert same(found, outputs(server, [again], [None], logprobs=3)[0])


def test_what_the_prefix_cache_holds_is_computed_by_itself(server: Engine) -> None:
    """Part of the chunk's KV does not come by, so the idle engine computes the chunk."""
    prompt, spans = prompt_of(server, [31, 32, 33], size=110)
    outputs(server, [prompt], [None])
    (found,) = outputs(server, [prompt], [{"spans": spans} | REPORT])
    assert spans[1][1] < found.num_cached_tokens < spans[2][1]  # two wholly, one in part
    for span in spans:
        assert not known(server, prompt, span, HARVESTED_FIRST)
        assert not known(server, prompt, span, HARVESTED)
    drain(server)
    contexts = scheduler(server).blend_internal.contexts
    for span, context in zip(spans, (contexts.first, contexts.later, contexts.later), strict=True):
        assert known(server, prompt, span, context)
    assert not scheduler(server).blend_chunks._coming


def test_learned_text_is_kept_at_its_second_sight(server: Engine) -> None:
    document = server.ids(90, 41)
    for seed in (42, 43):
        outputs(server, [server.ids(10, seed) + document + server.ids(10, seed + 50)], ["auto"])
    (found,) = outputs(
        server, [server.ids(25, 44) + document + server.ids(10, 92)], [{"auto": True} | REPORT]
    )
    assert (report(found)["reused_tokens"], report(found)["harvested_chunks"]) == (90, 1)


@pytest.mark.parametrize(
    ("num_shared", "reused", "kept"),
    [(40, 0, True), (70, 70, False)],
    ids=["for the least part", "for the most part"],
)
def test_a_missed_chunk_that_is_known_in_part(
    server: Engine, num_shared: int, reused: int, kept: bool
) -> None:
    """What is kept from a prefill is computed in it, so either the chunk is kept or its known text is
    reused; and the step blends."""
    seed = 800 + num_shared
    old = server.ids(100, seed)
    outputs(server, [server.ids(9, 901) + old + server.ids(9, 902)], [{"spans": [[9, 109]]}])
    edited = old[:num_shared] + server.ids(100 - num_shared, seed + 1)
    other = server.ids(100, seed + 2)
    prompt = server.ids(20, 903) + other + server.ids(5, 904) + edited + server.ids(12, 905)
    field = {"spans": [[20, 120], [125, 225]], "auto": True} | REPORT
    (found,) = outputs(server, [prompt], [field])
    assert report(found)["missed_chunks"] == 2
    assert (report(found)["reused_tokens"], report(found)["why_not"]) == (
        reused,
        "" if reused else "no chunk is known yet",
    )
    assert known(server, prompt, [20, 120], HARVESTED_FIRST)
    assert known(server, prompt, [125, 225], HARVESTED) == kept
    assert not scheduler(server).blend_chunks._coming
    drain(server)
    assert known(server, prompt, [125, 225], scheduler(server).blend_internal.contexts.later) != kept


PLACES = st.lists(st.integers(0, 400), unique=True, max_size=24).map(
    lambda ends: [(a, b) for a, b in zip(*[iter(sorted(ends))] * 2, strict=False)]
)


@given(PLACES, PLACES)
def test_what_is_reused_and_what_is_kept_lie_apart(
    runs: list[tuple[int, int]], places: list[tuple[int, int]]
) -> None:
    missed = [(start, ChunkIds("", tuple(range(start, end)))) for start, end in places]
    stay, kept, known = apart([(Run(start, end, b"", 0), ()) for start, end in runs], missed)
    computed = [set(chunk.token_ids) for _, chunk in kept]
    reused = {row for run, _ in stay for row in range(run.start, run.end)}
    assert not any(reused & rows for rows in computed)
    assert sorted(chunk.token_ids for chunk in [*known, *(chunk for _, chunk in kept)]) == sorted(
        chunk.token_ids for _, chunk in missed
    )
    found = {row for run in runs for row in range(*run)}
    for chunk in known:
        assert 2 * len(found & set(chunk.token_ids)) > len(chunk.token_ids)
    for rows in computed:
        assert 2 * len(found & rows) <= len(rows)
    left = [run for run in runs if not any(set(range(*run)) & rows for rows in computed)]
    assert [(run.start, run.end) for run, _ in stay] == left


def test_one_of_two_requests_at_once_keeps_a_chunk(server: Engine) -> None:
    prompts, fields = [], []
    for head in (5, 9):
        prompt, spans = prompt_of(server, [51, 52], head=head)
        prompts.append(prompt)
        fields.append({"spans": spans} | REPORT)
    outputs(server, prompts, fields)
    assert not scheduler(server).blend_chunks._coming
    prompt, spans = prompt_of(server, [52, 51], head=20)
    (found,) = outputs(server, [prompt], [{"spans": spans} | REPORT])
    assert report(found)["reused_tokens"] == 200


def test_an_aborted_request_leaves_no_reservation(cut: Engine) -> None:
    prompt, spans = prompt_of(cut, [61, 62, 63])
    from vllm import SamplingParams

    chunks = scheduler(cut).blend_chunks
    tokens, engine = chunks.num_tokens, cut.llm.llm_engine
    params = SamplingParams(max_tokens=4, extra_args={"blend": {"spans": spans}})
    engine.add_request("gone", {"prompt_token_ids": prompt}, params)
    engine.step()  # the first chunk and a part of the second
    assert chunks.num_tokens > tokens
    engine.abort_request(["gone"])
    drain(cut)
    kept = known(cut, prompt, spans[0], HARVESTED_FIRST)
    assert chunks.num_tokens == tokens + 100 * kept
    assert not chunks._coming
    (found,) = outputs(cut, [prompt], [{"spans": spans} | REPORT])
    assert report(found)["missed_chunks"] == 3 - kept


def test_chunks_by_themselves_where_that_is_wanted(tiny: Any) -> None:
    settings = {"ram_gb": 0.01, "harvest": False}
    with make_engine(tiny("llama"), additional_config={"vllm_blend": settings}) as engine:
        drain(engine)
        prompt, spans = prompt_of(engine, [1, 2])
        outputs(engine, [prompt], [{"spans": spans}])
        contexts = scheduler(engine).blend_internal.contexts
        drain(engine)
        for span, context in zip(spans, (contexts.first, contexts.later), strict=True):
            assert known(engine, prompt, span, context)
            assert not known(engine, prompt, span, HARVESTED)
            assert not known(engine, prompt, span, HARVESTED_FIRST)


@contextmanager
def stored(tiny: Any, folder: Path, **settings: Any) -> Iterator[Engine]:
    """An engine with a disk below it."""
    store = {"host_gb": 0.02, "disk": {"folder": str(folder), "budget_gb": 1, "fsync": False}}
    with (
        pytest.MonkeyPatch.context() as patch,
        make_engine(
            tiny("llama"),
            enable_prefix_caching=True,
            additional_config={"vllm_blend": {"store": store} | settings},
        ) as engine,
    ):
        patch.setattr(tier_fetches, "MIN_WAIT_S", 5.0)
        patch.setattr(waiting, "LOCATE_S", 5.0)
        drain(engine)
        yield engine


def test_harvested_chunks_outlive_the_engine(tiny: Any, tmp_path: Path) -> None:
    """The disk has them under names of their own: by marks, by content, and never by itself."""
    with stored(tiny, tmp_path) as engine:
        prompt, spans = prompt_of(engine, [71, 72, 73])
        outputs(engine, [prompt], [{"spans": spans}])
        drain(engine)
        assert engine.model.blending.chunks.tiers.store.flush()
        again = prompt[:-12] + engine.ids(12, 97)
    field = {"spans": spans, "recomp_ratio": 0.0} | REPORT
    with stored(tiny, tmp_path) as engine:
        (found,) = outputs(engine, [again], [field], logprobs=3)
        told = report(found)
        assert (told["reused_tokens"], told["loaded_chunks"], told["harvested_chunks"]) == (300, 3, 3)
        scheduler(engine).reset_prefix_cache()
        assert same(found, outputs(engine, [again], [None], logprobs=3)[0])
        assert scheduler(engine).blend_internal.background.num_computed == 0
    with stored(tiny, tmp_path, auto=True) as engine:
        (found,) = outputs(engine, [engine.ids(33, 5) + prompt[spans[1][0] :]], [REPORT])
        assert report(found)["reused_tokens"] == 200
    with stored(tiny, tmp_path, harvest=False) as engine:
        (found,) = outputs(engine, [again], [field])
        assert report(found)["reused_tokens"] == 0
