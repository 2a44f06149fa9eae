"""A paged cache in e4m3 on a GPU (FLASH_ATTN): the identities, within what eight bits are off.

That is measured on vLLM's own path: how far full prefill over such a cache is from full prefill over
one of the model's type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, make_engine, plan_for, relative_error, run
from rounding import mean, other_last_bits
from test_gpu import QUESTION, SENTENCES, blended, choices_made_again, distance

from vllm_blend.core.kv import StoredKV
from vllm_blend.model.graphs import RowGraphs
from vllm_blend.model.lookahead import Questions
from vllm_blend.store.fp8 import Fp8Layers

pytestmark = pytest.mark.gpu


@dataclass
class Plain:
    """What the engine with a cache of the model's type gives.

    Attributes:
        logits: after each prompt, ``[1, vocab_size]``.
        first_layer: K and V of the first prompt's layer 0, which no cache has touched.
        received: what the first prompt's question gives to the tokens before it.
        token_bytes: of a token in a layer's cache.
        num_blocks: of the cache.
    """

    logits: list[torch.Tensor]
    first_layer: list[torch.Tensor]
    received: torch.Tensor
    token_bytes: float
    num_blocks: int


@pytest.fixture(scope="module", params=["eager", "compiled"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    settings: dict[str, Any] = dict(dtype="bfloat16", max_num_seqs=16, gpu_memory_utilization=0.3)
    return settings | dict(enforce_eager=request.param == "eager")


@pytest.fixture(scope="module")
def orders(smollm2: Path) -> list[list[list[int]]]:
    """Chunks in eight orders."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(smollm2).encode
    chunks = [encode(sentence * (1 + 2 * index)) for index, sentence in enumerate(SENTENCES)]
    turned = [chunks[n:] + chunks[:n] for n in range(len(chunks))]
    return turned + [order[::-1] for order in turned]


@pytest.fixture(scope="module")
def question(smollm2: Path) -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(smollm2).encode(QUESTION)
    return ids


@pytest.fixture(scope="module")
def prompts(orders: list[list[list[int]]], question: list[int]) -> list[list[int]]:
    return [sum(order, []) + question for order in orders]


@pytest.fixture(scope="module")
def plain(
    options: dict[str, Any], prompts: list[list[int]], question: list[int], smollm2: Path
) -> Plain:
    with make_engine(smollm2, **options) as engine:
        return Plain(
            full_prefill(engine, prompts),
            [tensor.cpu() for tensor in engine.collect(prompts[0])[0]],
            received(engine, prompts[0], question),
            token_bytes(engine),
            len(engine.model.blending.attns[0].kv_cache),
        )


@pytest.fixture(scope="module")
def engine(options: dict[str, Any], plain: Plain, smollm2: Path) -> Iterator[Engine]:
    with make_engine(smollm2, kv_cache_dtype="fp8", **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def full(engine: Engine, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of vLLM's own full prefill over the cache in fp8."""
    return full_prefill(engine, prompts)


@pytest.fixture(scope="module")
def noise(full: list[torch.Tensor], plain: Plain) -> float:
    """Distance that eight bits alone make."""
    found = distance(full, torch.cat(plain.logits))
    print(f"fp8 alone: {found:.2e}")
    assert 0.005 < found < 0.5
    return found


def full_prefill(engine: Engine, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [engine.run(prompt, max_tokens=1)[1].cpu() for prompt in prompts]


def token_bytes(engine: Engine) -> float:
    attn = engine.model.blending.attns[0]
    num_tokens = attn.kv_cache.numel() / (2 * attn.num_kv_heads * attn.head_size)
    return float(attn.kv_cache.nbytes / num_tokens)


def received(engine: Engine, prompt: list[int], question: list[int]) -> torch.Tensor:
    """What the question's pass over exact KV finds, ``[num_chunk_tokens]``."""
    found: list[torch.Tensor] = []
    stock = Questions.received

    def keep(questions: Questions) -> Any:
        every = stock(questions)
        found.extend(one.cpu().double() for one in every.values())
        return every

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Questions, "received", keep)
        blended(engine, prompt, engine.collect(prompt), question, recomp_ratio=0.2, policy="ahead")
    return found.pop()


def distance_to(
    full: list[torch.Tensor], engine: Engine, prompts: list[list[int]], kv: Any, **settings: Any
) -> float:
    """Of blended prompts, each with ``kv(prompt)``."""
    logits = [blended(engine, prompt, kv(prompt), **settings).cpu() for prompt in prompts]
    return distance(logits, torch.cat(full))


@pytest.mark.covers("KV cache in fp8 (e4m3)", backend="FLASH_ATTN", family="smollm2")
def test_the_cache_takes_half_the_memory(engine: Engine, plain: Plain) -> None:
    attn = engine.model.blending.attns[0]
    assert type(attn.impl).__name__ == "FlashAttentionBlendImpl"
    assert attn.kv_cache.dtype == torch.uint8
    assert token_bytes(engine) == plain.token_bytes / 2
    assert len(attn.kv_cache) >= 2 * plain.num_blocks - 1  # of the same memory


@pytest.mark.covers("KV cache in fp8 (e4m3)", backend="FLASH_ATTN", family="smollm2")
@pytest.mark.parametrize("policy", ["random", "hkvd", "ahead*static"])
@pytest.mark.parametrize("ratio", [0.0, 0.16, 1.0])
def test_exact_kv_is_full_prefill(
    engine: Engine,
    prompts: list[list[int]],
    question: list[int],
    full: list[torch.Tensor],
    noise: float,
    ratio: float,
    policy: str,
) -> None:
    settings = dict(question=question, recomp_ratio=ratio, policy=policy)
    found = distance_to(full, engine, prompts, engine.collect, **settings)
    print(f"{policy} {ratio}: {found:.2e} ({noise:.2e})")
    assert found < noise


def test_exact_kv_is_as_near_as_full_prefill_is_to_itself(
    engine: Engine,
    prompts: list[list[int]],
    question: list[int],
    full: list[torch.Tensor],
    noise: float,
) -> None:
    """In the mean: stored K is rounded to its type once more, so that some last bits are others. Nor is
    it farther than eight bits alone make."""
    exact, to_itself = torch.cat(full), []
    assert distance(full_prefill(engine, prompts), exact) == 0  # the same each time, if nothing differs
    for seed in range(8):
        with other_last_bits(engine, seed):
            to_itself.append(distance(full_prefill(engine, prompts), exact))
    found = [
        distance_to(
            full, engine, prompts, engine.collect, question=question, recomp_ratio=r, policy=policy
        )
        for policy in ("random", "hkvd", "ahead*static")
        for r in (0.0, 0.16, 1.0)
    ]
    print(f"exact KV {mean(found):.3f}, full prefill to itself {mean(to_itself):.3f}")
    assert mean(found) < min(noise, mean(to_itself))


def test_any_kv_at_ratio_one_is_full_prefill(
    engine: Engine,
    prompts: list[list[int]],
    question: list[int],
    full: list[torch.Tensor],
    noise: float,
) -> None:
    wrong = [[torch.randn_like(t) * 5 for t in layer] for layer in engine.collect(prompts[0])]
    settings = dict(question=question, recomp_ratio=1.0)
    assert distance_to(full, engine, prompts, lambda _: wrong, **settings) < noise
    for policy in ("random", "ahead*static"):  # whose rows run in the model's own forward
        assert distance_to(full, engine, prompts, lambda _: wrong, policy=policy, **settings) == 0


def test_chunks_alone_come_near_and_the_error_falls_with_the_ratio(
    engine: Engine,
    orders: list[list[list[int]]],
    prompts: list[list[int]],
    question: list[int],
    full: list[torch.Tensor],
    noise: float,
) -> None:
    """Stored KV is as it was, too: nothing is rounded to eight bits where it lies."""
    alone = {tuple(prompt): engine.stored(order) for prompt, order in zip(prompts, orders, strict=True)}
    before = [tensor.clone() for kvs in alone.values() for layer in kvs for tensor in layer]
    errors = [
        distance_to(
            full, engine, prompts, lambda p: alone[tuple(p)], question=question, recomp_ratio=ratio
        )
        for ratio in (0.0, 0.5, 1.0)
    ]
    print(f"at 0, 0.5 and 1: {errors} ({noise:.2e})")
    assert errors[0] > errors[1] > errors[2]
    assert errors[0] > 1.3 * noise  # so the identities above are not true of any KV
    after = [tensor for kvs in alone.values() for layer in kvs for tensor in layer]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_kv_that_is_kept_has_not_been_rounded(
    engine: Engine, plain: Plain, prompts: list[list[int]]
) -> None:
    for kept, expected in zip(engine.collect(prompts[0])[0], plain.first_layer, strict=True):
        assert relative_error(kept.cpu(), expected) < 8 * torch.finfo(torch.bfloat16).eps


def test_kv_kept_in_eight_bits_is_as_near(
    engine: Engine,
    prompts: list[list[int]],
    question: list[int],
    full: list[torch.Tensor],
    noise: float,
) -> None:
    """A scale a token and head there, another in the cache: rounded once for each."""
    shape = engine.model.blending.kv_shape

    def narrowed(prompt: list[int]) -> list[list[torch.Tensor]]:
        layers = engine.collect(prompt)
        size = len(layers) * sum(t.nbytes for t in layers[0])  # more than enough
        memory = torch.empty(size, dtype=torch.uint8, device=layers[0][0].device)
        count = len(prompt)
        row = 2 * count * shape.num_kv_heads * (4 + shape.head_size)
        kept = Fp8Layers(memory[: row * len(layers)], shape, count)
        for index, (k, v) in enumerate(layers):
            kept.write(index, k, v)
        return [list(kept.layer(index)) for index in range(len(layers))]

    settings = dict(question=question, recomp_ratio=0.16, policy="random")
    assert distance_to(full, engine, prompts, narrowed, **settings) < 1.5 * noise


def test_the_questions_attention_is_read_from_the_cache(
    engine: Engine, plain: Plain, prompts: list[list[int]], question: list[int]
) -> None:
    error = relative_error(received(engine, prompts[0], question), plain.received)
    print(f"attention of the question: {error:.1e}")
    assert 0 < error < 0.3


def test_rows_replay_graphs(
    engine: Engine,
    orders: list[list[list[int]]],
    prompts: list[list[int]],
    question: list[int],
    noise: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old_kvs = engine.stored(orders[0])
    eager = engine.llm.llm_engine.vllm_config.model_config.enforce_eager
    assert (engine.model.blending.graphs is None) == eager
    used: list[Any] = []
    stock = RowGraphs.prepared
    monkeypatch.setattr(RowGraphs, "prepared", lambda *a: used.append(stock(*a)) or used[-1])
    again = choices_made_again(monkeypatch)
    settings = [dict(recomp_ratio=ratio, policy="ahead*static") for ratio in (0.16, 0.3, 0.16)]
    replayed = [blended(engine, prompts[0], old_kvs, question, **each) for each in settings]
    forwards = 2 * len(settings) + len(again)
    assert len(used) == (0 if eager else forwards) and all(used)
    assert torch.equal(replayed[0], replayed[2])
    monkeypatch.setattr(engine.model.blending, "graphs", None)
    for each, one in zip(settings, replayed, strict=True):
        assert relative_error(one, blended(engine, prompts[0], old_kvs, question, **each)) < noise


def test_blended_requests_in_one_batch_answer_as_alone(
    engine: Engine, orders: list[list[list[int]]], question: list[int]
) -> None:
    chunks = orders[0]
    first, plan = plan_for(engine, chunks, question[:1], question, recomp_ratio=0.3)
    second, other = plan_for(engine, chunks[::-1], question[:2], question, recomp_ratio=0.5)
    alone = [run(engine, [first], [plan])[0], run(engine, [second], [other])[0]]
    together = run(engine, [first, chunks[3], second], [plan, None, other])
    assert [together[0], together[2]] == alone
    on_host = tuple(
        replace(span, kv=StoredKV(tuple((k.cpu(), v.cpu()) for k, v in span.kv.layers)))
        for span in plan.spans
    )
    assert run(engine, [first], [replace(plan, spans=on_host)]) == alone[:1]
