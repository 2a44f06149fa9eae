"""The identities of blending on a GPU, eager and compiled: FLASH_ATTN in both 16-bit types, XFORMERS in
bf16 and fp32.

Kernels add up in orders of their own, so equal results differ by rounding. What that is worth is
measured on others' code: how far vLLM's own path, and transformers' model in the same type, are from
fp64. In bf16 that is 0.4% of the logits after one prompt and 10% after another, so distances are the
root mean square over some prompts; and torch.compile halves it, which blended steps run without.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, make_engine, plan_for, relative_error, run

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.settings import asked_layers
from vllm_blend.model.graphs import RowGraphs
from vllm_blend.model.lookahead import Questions
from vllm_blend.model.row_choice import RowChoice
from vllm_blend.plugin import worker_messages
from vllm_blend.plugin.step_requests import BlendModelState
from vllm_blend.server.worker.chunk_memory import ChunkMemory
from vllm_blend.server.worker.collected import HostCopies, HostRows
from vllm_blend.store.streaming_layers import StreamingKV, StreamingLayers

pytestmark = pytest.mark.gpu

SENTENCES = (
    "The bakery on Mill Street was founded in 1921 by Ada Lindqvist, who came from Uppsala. ",
    "Bread needs flour, water, salt and time; the last of these cannot be bought. ",
    "In winter the river freezes, and the ferry to the island stops until March. ",
    "Her grandson Elias keeps the oven that she built, and bakes rye bread in it on Fridays. ",
)
QUESTION = "Question: who founded the bakery? Answer:"


IMPLS = {"FLASH_ATTN": "FlashAttentionBlendImpl", "XFORMERS": "XFormersImpl"}
KINDS = [
    ("FLASH_ATTN", "bfloat16"),
    ("FLASH_ATTN", "float16"),
    ("XFORMERS", "bfloat16"),
    ("XFORMERS", "float32"),
]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Attention backend and type."""
    backend, dtype = request.param
    if backend == "XFORMERS" and find_spec("xformers") is None:
        pytest.skip("xformers is not installed")
    return backend, dtype


@pytest.fixture(scope="module", params=["eager", "compiled"])
def engine(request: pytest.FixtureRequest, kind: tuple[str, str], smollm2: Path) -> Iterator[Engine]:
    backend, dtype = kind
    options: dict[str, Any] = dict(dtype=dtype, gpu_memory_utilization=0.3, max_num_seqs=16)
    if backend != "FLASH_ATTN":  # which is vLLM's own choice
        options |= dict(attention_backend=backend)
    if request.param == "compiled":
        options |= dict(enforce_eager=False)
    with make_engine(smollm2, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def chunks(engine: Engine) -> list[list[int]]:
    encode = engine.llm.get_tokenizer().encode
    return [encode(sentence * (1 + 2 * index)) for index, sentence in enumerate(SENTENCES)]


@pytest.fixture(scope="module")
def question(engine: Engine) -> list[int]:
    ids: list[int] = engine.llm.get_tokenizer().encode(QUESTION)
    return ids


@pytest.fixture(scope="module")
def orders(chunks: list[list[int]]) -> list[list[list[int]]]:
    """The chunks in eight orders: a prompt each, with the question behind them."""
    turned = [chunks[n:] + chunks[:n] for n in range(len(chunks))]
    return turned + [order[::-1] for order in turned]


@pytest.fixture(scope="module")
def prompts(orders: list[list[list[int]]], question: list[int]) -> list[list[int]]:
    return [sum(order, []) + question for order in orders]


@pytest.fixture(scope="module")
def prompt(prompts: list[list[int]]) -> list[int]:
    return prompts[0]


@pytest.fixture(scope="module")
def exact(engine: Engine, prompts: list[list[int]], smollm2: Path) -> torch.Tensor:
    """Logits after the prompts by the same weights in fp64, ``[num_prompts, vocab_size]``."""
    return torch.cat(transformers_logits(smollm2, torch.float64, prompts, engine))


@pytest.fixture(scope="module")
def rounding(engine: Engine, prompts: list[list[int]], exact: torch.Tensor, smollm2: Path) -> float:
    """Distance that rounding alone makes."""
    stock = distance([engine.run(prompt, max_tokens=1)[1] for prompt in prompts], exact)
    dtype = engine.model.blending.kv_shape.dtype
    other = distance(transformers_logits(smollm2, dtype, prompts, engine), exact)
    print(f"rounding alone: vLLM {stock:.2e}, transformers {other:.2e}")
    assert 0 < min(stock, other) < max(stock, other) < 0.1
    return max(stock, other)


def transformers_logits(
    folder: Path, dtype: torch.dtype, prompts: list[list[int]], engine: Engine
) -> list[torch.Tensor]:
    """After each prompt, ``[1, vocab_size]``."""
    from transformers import AutoModelForCausalLM

    device = engine.model.layers[0].self_attn.o_proj.weight.device
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    with torch.inference_mode():
        return [model(torch.tensor([p], device=device)).logits[:, -1] for p in prompts]


def distance(logits: list[torch.Tensor], exact: torch.Tensor) -> float:
    """Root mean square over the prompts of the relative error of their logits."""
    errors = [relative_error(one[-1], other) for one, other in zip(logits, exact, strict=True)]
    return (sum(error**2 for error in errors) / len(errors)) ** 0.5


def blended(
    engine: Engine, prompt: list[int], old_kvs: Any, question: list[int], **settings: Any
) -> torch.Tensor:
    """Logits after the prompt."""
    with engine.blending(old_kvs, len(question), **settings):
        return engine.run(prompt, max_tokens=1)[1]


def collected(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """Logits from the layers as a blend step runs them, all rows computed."""
    engine.flags["collect"] = True
    try:
        return engine.run(prompt, max_tokens=1)[1]
    finally:
        engine.flags["collect"] = False


def test_collecting_does_not_change_the_answer(
    engine: Engine, prompts: list[list[int]], exact: torch.Tensor, rounding: float
) -> None:
    assert distance([collected(engine, prompt) for prompt in prompts], exact) < 2 * rounding


def test_the_parts_are_those_that_these_tests_are_about(engine: Engine, kind: tuple[str, str]) -> None:
    backend, dtype = kind
    runner = engine.llm.llm_engine.model_executor.driver_worker.model_runner
    attn = engine.model.layers[0].self_attn.attn
    assert attn.attn_backend.get_name() == backend
    assert type(attn.impl).__name__ == IMPLS[backend]
    assert isinstance(runner.model_state, BlendModelState)
    assert engine.model.blending.kv_shape.dtype == getattr(torch, dtype)


@pytest.mark.covers("rows chosen before the step", backend="{kind[0]}", family="smollm2")
@pytest.mark.covers("rows chosen at a check layer", backend="{kind[0]}", family="smollm2")
@pytest.mark.covers("torch.compile", backend="{kind[0]}", family="smollm2")
@pytest.mark.parametrize("policy", ["hkvd", "random", "ahead*static"])
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.16, 0.5, 1.0])
def test_exact_kv_reproduces_full_prefill(
    engine: Engine,
    prompts: list[list[int]],
    question: list[int],
    exact: torch.Tensor,
    rounding: float,
    ratio: float,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    again = choices_made_again(monkeypatch)
    for prompt in prompts:
        kv, before = engine.collect(prompt), len(again)
        found.append(blended(engine, prompt, kv, question, recomp_ratio=ratio, policy=policy))
        twice = len(again) > before  # the question points nowhere
        share = max(ratio, min(0.5, 2 * ratio)) if twice else ratio
        kept = int(share * (len(prompt) - len(question))) + len(question)
        assert len(engine.flags["imp_indices"]) == kept
    assert "ahead" in policy or not again
    assert distance(found, exact) < 2 * rounding


def test_any_kv_at_ratio_one_is_full_prefill(
    engine: Engine,
    prompts: list[list[int]],
    question: list[int],
    exact: torch.Tensor,
    rounding: float,
) -> None:
    noise = [[torch.randn_like(t) * 5 for t in layer] for layer in engine.collect(prompts[0])]
    found = [blended(engine, prompt, noise, question, recomp_ratio=1.0) for prompt in prompts]
    assert distance(found, exact) < 2 * rounding


@pytest.mark.parametrize("policy", ["hkvd", "random"])
def test_chunks_alone_come_near_and_the_error_falls_with_the_ratio(
    engine: Engine,
    policy: str,
    orders: list[list[list[int]]],
    prompts: list[list[int]],
    question: list[int],
    exact: torch.Tensor,
    rounding: float,
) -> None:
    old_kvs = [engine.stored(order) for order in orders]
    before = [[[tensor.clone() for tensor in layer] for layer in kvs] for kvs in old_kvs]
    errors = []
    for ratio in (0.0, 0.5, 1.0):
        pairs = zip(prompts, old_kvs, strict=True)
        found = [
            blended(engine, prompt, kvs, question, recomp_ratio=ratio, policy=policy)
            for prompt, kvs in pairs
        ]
        errors.append(distance(found, exact))
    print(f"at 0, 0.5 and 1: {errors}")
    assert errors[0] > errors[1] > errors[2]
    assert errors[0] > 5 * rounding  # so the identities above are not true of any KV
    assert errors[2] < 2 * rounding
    for kvs, copies in zip(old_kvs, before, strict=True):
        for layer, copy in zip(kvs, copies, strict=True):
            for tensor, kept in zip(layer, copy, strict=True):
                assert torch.equal(tensor, kept)


def test_layer_0_key_of_a_chunk_rotates_to_its_place(
    engine: Engine, chunks: list[list[int]], prompt: list[int]
) -> None:
    alone, whole = engine.collect(chunks[2])[0], engine.collect(prompt)[0]
    start = len(chunks[0]) + len(chunks[1])
    place = slice(start, start + len(chunks[2]))
    # before RoPE they are the same; the rotation itself is tests/ops/test_shift_scatter.py's
    allowed = 8 * torch.finfo(alone[0].dtype).eps
    assert relative_error(alone[0], whole[0][place]) < allowed
    assert relative_error(alone[1], whole[1][place]) < allowed


def test_gradual_filtering(
    engine: Engine,
    prompts: list[list[int]],
    question: list[int],
    exact: torch.Tensor,
    rounding: float,
) -> None:
    gradual = dict(check_layers=[1, 3], recomp_ratios=[0.6, 0.2])
    found = []
    for prompt in prompts:
        found.append(blended(engine, prompt, engine.collect(prompt), question, **gradual))
        kept = int(0.2 * (len(prompt) - len(question))) + len(question)
        assert len(engine.flags["imp_indices"]) == kept
    assert distance(found, exact) < 2 * rounding


@pytest.mark.covers("mixed batches", backend="{kind[0]}", family="smollm2")
def test_blended_requests_in_one_batch_answer_as_alone(
    engine: Engine, chunks: list[list[int]], question: list[int]
) -> None:
    first, plan = plan_for(engine, chunks, question[:1], question, recomp_ratio=0.3)
    second, other = plan_for(engine, chunks[::-1], question[:2], question, recomp_ratio=0.5)
    alone = [run(engine, [first], [plan])[0], run(engine, [second], [other])[0]]
    together = run(engine, [first, chunks[3], second], [plan, None, other])
    assert [together[0], together[2]] == alone


def choices_made_again(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps whose question points nowhere, so that more rows are chosen and prepared."""
    found: list[Any] = []
    stock = RowChoice.more_rows

    def more_rows(choice: RowChoice) -> Any:
        chosen = stock(choice)
        found.extend([] if chosen is None else [chosen])
        return chosen

    monkeypatch.setattr(RowChoice, "more_rows", more_rows)
    return found


@pytest.mark.covers("CUDA graphs of blended steps", backend="{kind[0]}", family="smollm2")
@pytest.mark.parametrize("policy", ["static", "ahead*static"])
def test_rows_replay_graphs(
    engine: Engine,
    chunks: list[list[int]],
    prompt: list[int],
    question: list[int],
    rounding: float,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows chosen before the step run from CUDA graphs; the answer is that without."""
    old_kvs = engine.stored(chunks)
    eager = engine.llm.llm_engine.vllm_config.model_config.enforce_eager
    used: list[Any] = []
    graphs = engine.model.blending.graphs
    assert (graphs is None) == eager
    stock = RowGraphs.prepared
    monkeypatch.setattr(RowGraphs, "prepared", lambda *a: used.append(stock(*a)) or used[-1])
    again = choices_made_again(monkeypatch)
    settings = [dict(recomp_ratio=ratio, policy=policy) for ratio in (0.16, 0.3, 0.0, 0.16)]
    replayed = [blended(engine, prompt, old_kvs, question, **each) for each in settings]
    if not eager:  # the pass ahead, too
        assert len(used) == len(settings) * (1 + ("ahead" in policy)) + len(again)
        assert all(run is not None for run in used)
    monkeypatch.setattr(engine.model.blending, "graphs", None)
    for each, one in zip(settings, replayed, strict=True):
        other = blended(engine, prompt, old_kvs, question, **each)
        assert relative_error(one, other) < 3 * rounding
    after = engine.run(prompt, max_tokens=1)[1]
    assert relative_error(after, engine.run(prompt, max_tokens=1)[1]) < rounding


def test_a_pass_ahead_sums_the_questions_attention(
    engine: Engine,
    prompt: list[int],
    question: list[int],
    rounding: float,
    smollm2: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the paged cache, from graphs where there are some: as near as the plain sum is."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, attn_implementation="eager")
    with torch.no_grad():
        layers = model(torch.tensor([prompt]), output_attentions=True).attentions
    count, asked = len(question), asked_layers(len(layers))
    parts = [layers[i][0, :, -count:, :-count].double().sum((0, 1)) for i in asked]
    exact = torch.stack(parts).sum(0)
    found: list[torch.Tensor] = []
    stock = Questions.received

    def received(questions: Questions) -> Any:
        every = stock(questions)
        (one,) = every.values()
        found.append(one.cpu().double())
        return every

    monkeypatch.setattr(Questions, "received", received)
    blended(engine, prompt, engine.collect(prompt), question, recomp_ratio=0.2, policy="ahead")
    error = relative_error(found.pop(), exact)
    print(f"attention of the question: {error:.1e}")
    assert error < 0.2


@pytest.mark.parametrize("size", [None, 20])
def test_stored_kv_may_lie_anywhere(
    engine: Engine,
    chunks: list[list[int]],
    question: list[int],
    size: int | None,
) -> None:
    """The answer is that of KV on the GPU; ``size``: of the windows of a chunked prefill."""
    prompt, plan = plan_for(engine, chunks, question[:1], question, recomp_ratio=0.3)
    memory = ChunkMemory(1 << 26)

    def moved(kv: StoredKV, kind: str) -> StoredKV:
        if kind == "gpu":
            return kv
        if kind == "pinned":  # K and V behind one another
            shape = engine.model.blending.kv_shape
            copies = HostCopies(kv.layers[0][0].device)
            rows = HostRows(memory.reserve(str(id(kv)).encode(), shape, kv.num_tokens), copies)
            _, places = rows.copied(0, kv.num_tokens)
            launch = copies.prepared([(places, 0)])
            for index, layer in enumerate(kv.layers):
                launch(index, torch.stack(layer))
            copies.end().synchronize()
            return rows.kv()
        layers = tuple((k.cpu(), v.cpu()) for k, v in kv.layers)
        if kind == "pageable":
            return StoredKV(layers)
        late = StreamingLayers(layers, "late", 60)

        def load() -> None:
            for _ in layers:
                time.sleep(1e-3)
                late.arrive()

        threading.Thread(target=load).start()
        return StreamingKV(late)

    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    before = scheduler.max_num_scheduled_tokens
    scheduler.max_num_scheduled_tokens = size or before
    try:
        expected = run(engine, [prompt], [plan])
        for kinds in ("pinned",), ("pageable",), ("late",), ("gpu", "pinned", "late", "pageable"):
            spans = tuple(
                replace(span, kv=moved(span.kv, kind))
                for span, kind in zip(plan.spans, cycle(kinds), strict=False)
            )
            assert run(engine, [prompt], [replace(plan, spans=spans)]) == expected, kinds
    finally:
        scheduler.max_num_scheduled_tokens = before


@pytest.mark.covers("chunked prefill", backend="{kind[0]}", family="smollm2")
def test_windows_of_a_chunked_prefill(
    engine: Engine, prompts: list[list[int]], question: list[int], exact: torch.Tensor, rounding: float
) -> None:
    prompt = prompts[0]
    whole = engine.collect(prompt)
    size = (len(prompt) - 1) // 3
    part = 3 * size + 1  # its last window is a single token, which vLLM would run as a decode
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    before = scheduler.max_num_scheduled_tokens
    scheduler.max_num_scheduled_tokens = size
    try:
        found = [
            blended(engine, prompt, engine.collect(prompt), question, recomp_ratio=0.2)
            for prompt in prompts
        ]
        begun = engine.collect(prompt[:part])
    finally:
        scheduler.max_num_scheduled_tokens = before
    assert distance(found, exact) < 2 * rounding
    for layer, other in zip(begun, whole, strict=True):
        for tensor, expected in zip(layer, other, strict=True):
            assert relative_error(tensor, expected[:part]) < 0.05
            assert relative_error(tensor[-1], expected[part - 1]) < 0.05


def test_other_requests_do_not_notice(engine: Engine, prompt: list[int], question: list[int]) -> None:
    before = engine.run(prompt)
    with engine.blending(engine.collect(prompt), len(question)):
        engine.run(prompt)
    after = engine.run(prompt)
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])


def test_stages_are_timed_by_events(
    engine: Engine, chunks: list[list[int]], question: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    stock = worker_messages.add_events
    monkeypatch.setattr(
        worker_messages, "add_events", lambda out, news: heard.append(news) or stock(out, news)
    )
    prompt, plan = plan_for(engine, chunks, [], question)
    heard.clear()
    run(engine, [prompt], [replace(plan, timed=True)], max_tokens=1)
    (seconds,) = heard[0]().seconds.values()
    assert seconds["select"] > 0
    assert seconds["fuse"] > 0
