"""The friendly door, and quality as ratio and mask change, on SmolLM2 and the inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine

from vllm_blend import Blender, BlendSettings
from vllm_blend.cli.eval.logits import kl_divergence, suffix_logits
from vllm_blend.core.settings import NO_STAND_IN

INPUTS = Path(__file__).parents[2] / "inputs"


@pytest.fixture(scope="module")
def blender(smollm2_engine: Engine) -> Blender:
    return Blender(smollm2_engine.llm, stand_in="", scored=False)


@pytest.fixture(scope="module")
def sample() -> dict[str, Any]:
    return json.loads((INPUTS / "3.json").read_text())


@pytest.fixture(scope="module")
def texts(sample: dict[str, Any]) -> list[str]:
    return [sample[str(i)] for i in range(sample["chunk_num"])]


def test_a_chunk_is_computed_once(blender: Blender, texts: list[str], monkeypatch: Any) -> None:
    runs: list[int] = []
    run = blender.collector.run
    monkeypatch.setattr(
        blender.collector,
        "run",
        lambda prompts, *rest: runs.append(len(prompts)) or run(prompts, *rest),
    )
    first, again, second = blender.chunks([texts[0], texts[0], texts[1]])
    assert first is again
    assert blender.chunk(texts[1]) is second
    assert blender.chunk(list(first.token_ids[: -len(blender.separator)])) is first
    assert sum(runs) == 2
    blender.forget(first)
    assert blender.chunk(texts[0]) is not first
    assert sum(runs) == 3


def test_prompt_is_what_the_chat_template_says(blender: Blender, texts: list[str]) -> None:
    prompt = blender.prompt(blender.chunks(texts), "What is the limit?")
    text = "\n\n".join([*texts, "What is the limit?"])
    rendered = blender.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    assert blender.tokenizer.decode(prompt.token_ids) == rendered
    for span, chunk in zip(prompt.spans[1:], blender.chunks(texts), strict=True):
        assert tuple(prompt.token_ids[span.start : span.end]) == chunk.token_ids
    assert prompt.spans[0].token_ids == blender.frame.head


def test_ratio_one_answers_as_full_prefill(blender: Blender, texts: list[str], sample: Any) -> None:
    from vllm import SamplingParams

    prompt = blender.prompt(blender.chunks(texts), sample["query"])
    params = SamplingParams(temperature=0, max_tokens=12)
    blended = blender.generate(prompt, params, settings=BlendSettings(recomp_ratio=1.0))
    full = blender.generate(prompt, params, blend=False)
    assert blended.outputs[0].token_ids == full.outputs[0].token_ids
    several = blender.generate([prompt, prompt], params, settings=BlendSettings(recomp_ratio=1.0))
    assert [output.outputs[0].token_ids for output in several] == [full.outputs[0].token_ids] * 2


def test_kl_falls_as_the_ratio_rises_and_the_exact_mask_is_nearer(
    blender: Blender, texts: list[str], sample: Any
) -> None:
    prompt = blender.prompt(blender.chunks(texts), sample["query"])
    full = suffix_logits(blender, prompt, blend=False)
    assert full.shape[0] == len(prompt.token_ids) - prompt.spans[-1].end

    def kl(ratio: float, mask: str = "exact") -> float:
        settings = BlendSettings(recomp_ratio=ratio, mask=mask)
        return kl_divergence(full, suffix_logits(blender, prompt, settings=settings))

    by_ratio = [kl(ratio) for ratio in (0.0, 0.16, 0.5, 1.0)]
    assert by_ratio == sorted(by_ratio, reverse=True)
    assert by_ratio[-1] < 1e-6
    assert kl(0.5, "bottom_right") > by_ratio[2]


def test_suffix_logits_end_where_the_engine_samples(blender: Blender, texts: list[str]) -> None:
    from vllm import SamplingParams

    prompt = blender.prompt(blender.chunks(texts[:2]), "Why?")
    token = (
        blender.generate(prompt, SamplingParams(temperature=0, max_tokens=1)).outputs[0].token_ids[0]
    )
    assert int(suffix_logits(blender, prompt)[-1].argmax()) == token


def test_raw_text_and_arguments(smollm2_engine: Engine) -> None:
    blender = Blender(smollm2_engine.llm, chat=False, separator="")
    assert blender.frame.head == blender.frame.tail == ()  # SmolLM2 adds no BOS
    prompt = blender.prompt([blender.chunk("The sky is green today.")], " Is it?", answer=[5, 6])
    assert prompt.spans[0].start == 0
    assert prompt.token_ids[-2:] == [5, 6]
    with pytest.raises(ValueError, match="chunks is empty"):
        blender.prompt([], "Is it?")
    with pytest.raises(ValueError, match="question is empty"):
        blender.prompt([blender.chunk("x")], "")
    with pytest.raises(ValueError, match="system is set, but chat is False"):
        Blender(smollm2_engine.llm, chat=False, system="Be brief.")
    with pytest.raises(ValueError, match="the model has 30 layers"):
        Blender(smollm2_engine.llm, BlendSettings(check_layers=(30,)))


def test_chunks_are_computed_behind_the_head(smollm2_engine: Engine, texts: list[str]) -> None:
    """Right after the head a chunk's stored KV is exact; computed after anything else it is not."""
    blender = Blender(smollm2_engine.llm, chat=False, head="Answer from these texts:", stand_in="")
    question, reuse = "What is the limit?", BlendSettings(recomp_ratio=0.0)
    own, bare = blender.chunk(texts[0]), blender.chunk(texts[0], head="")
    assert own is blender.chunk(texts[0], head="Answer from these texts:")
    assert own is not bare and own.token_ids == bare.token_ids
    assert own.context == blender.frame.head and bare.context == ()
    prompts = [blender.prompt([chunk], question) for chunk in (own, bare)]
    assert prompts[0].token_ids == prompts[1].token_ids
    assert prompts[0].token_ids[: len(own.context)] == list(own.context)
    assert [span.start for span in prompts[0].spans] == [0, len(own.context)]
    full = suffix_logits(blender, prompts[0], blend=False)
    exact, far = (
        kl_divergence(full, suffix_logits(blender, prompt, settings=reuse)) for prompt in prompts
    )
    assert exact < 1e-6 and far > 1e-3
    blender.forget(own)
    assert blender.chunk(texts[0], head="") is bare
    assert blender.chunk(texts[0]) is not own


def test_a_document_behind_all_that_precedes_is_a_full_prefill(
    smollm2_engine: Engine, texts: list[str]
) -> None:
    blender = Blender(smollm2_engine.llm, head="Answer from this text:", stand_in="")
    text = "\n".join(texts[:3])
    ids = blender.tokenizer.encode(text, add_special_tokens=False)
    whole = blender.document(text, chunk_tokens=100, overlap=len(ids))
    assert len(whole) == -(-len(ids) // 100)
    assert [i for chunk in whole for i in chunk.token_ids] == [*ids, *blender.separator]
    assert [len(chunk.context) for chunk in whole[:2]] == [
        len(blender.frame.head),
        len(blender.frame.head) + len(whole[0].token_ids),
    ]
    prompt = blender.prompt(whole, "What is the limit?")
    full = suffix_logits(blender, prompt, blend=False)

    def kl(overlap: int) -> float:
        chunks = blender.document(text, chunk_tokens=100, overlap=overlap)
        prompt = blender.prompt(chunks, "What is the limit?")
        reused = BlendSettings(recomp_ratio=0)
        return kl_divergence(full, suffix_logits(blender, prompt, settings=reused))

    assert kl(len(ids)) < 1e-6 < kl(50) < kl(0)


def test_a_documents_chunks_are_known_again(smollm2_engine: Engine, texts: list[str]) -> None:
    blender = Blender(smollm2_engine.llm)
    first = blender.document(texts[0], chunk_tokens=40, overlap=16)
    assert blender.document(texts[0], chunk_tokens=40, overlap=16) == first
    ids = blender.token_ids([texts[0]], separated=False)[0]
    parts = [chunk.token_ids for chunk in first]
    assert max(map(len, parts)) <= 40 + len(blender.separator)
    start = len(parts[0]) + len(parts[1])
    assert first[2].context == blender.frame.head + ids[start - 16 : start]
    other = blender.document(texts[0], chunk_tokens=40, overlap=15)
    assert other[0] is first[0] and other[2] is not first[2]
    with pytest.raises(ValueError, match="overlap is -1; allowed: 0 or more"):
        blender.document(texts[0], overlap=-1)
    with pytest.raises(ValueError, match="chunk_tokens is 0; allowed: 1 or more"):
        blender.document(texts[0], chunk_tokens=0)
    with pytest.raises(ValueError, match="before has 1 entries for 2 texts"):
        blender.chunks(texts[:2], before=[[1]])
    with pytest.raises(TypeError, match="before 1 is list; expected text or a list of token ids"):
        blender.chunks(texts[:2], before=["", [0.5]])  # type: ignore[list-item]
    alone, behind = blender.chunks([texts[1]] * 2, before=["", "One two."])
    assert alone is blender.chunk(texts[1])
    assert behind.context == blender.frame.head + blender.token_ids(["One two."], separated=False)[0]


def test_a_prompt_may_have_another_head(smollm2_engine: Engine, texts: list[str]) -> None:
    blender = Blender(smollm2_engine.llm, chat=False, head="Answer from these texts:")
    plain = Blender(smollm2_engine.llm, chat=False)
    chunks = blender.chunks(texts[:2])
    prompt = blender.prompt(chunks, "Why?", head="Say what is asked:")
    head = [*plain.chunk("Say what is asked:").token_ids]
    assert prompt.token_ids[: len(head)] == head and prompt.spans[0].start == len(head)
    full = suffix_logits(blender, prompt, blend=False)
    blended = suffix_logits(blender, prompt, settings=BlendSettings(recomp_ratio=1.0))
    assert kl_divergence(full, blended) < 1e-6
    with pytest.raises(TypeError, match="head is list"):
        Blender(smollm2_engine.llm, chat=False, head=[0.5])  # type: ignore[list-item]


def test_each_prompt_of_a_batch_may_have_settings_of_its_own(
    blender: Blender, texts: list[str]
) -> None:
    from vllm import SamplingParams

    prompt = blender.prompt(blender.chunks(texts[:3]), "Why?")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    each = [
        BlendSettings(policy="ahead", recomp_ratio=0.2),
        BlendSettings(recomp_ratio=0.3, mask="bottom_right"),
        BlendSettings(policy="heads", recomp_ratio=0.1),
        BlendSettings(policy="ahead", recomp_ratio=0.4, mask="bottom_right"),
    ]
    alone = [blender.generate(prompt, params, settings=settings) for settings in each]
    both = blender.generate([prompt] * 4, params, settings=each)
    assert [o.outputs[0].token_ids for o in both] == [o.outputs[0].token_ids for o in alone]
    with pytest.raises(ValueError, match="settings has 1 entries for 2 prompts"):
        blender.generate([prompt] * 2, params, settings=each[:1])


def test_stored_kv_is_what_a_chunk_is_kept_as(blender: Blender) -> None:
    chunk = blender.chunk("Tolmere is a harbour town.")
    shape = blender.model.blending.kv_shape
    chunk.kv.check(shape, len(chunk.token_ids))
    assert chunk.kv.num_bytes == 2 * 30 * len(chunk.token_ids) * 3 * 64 * 4
    assert all(t.dtype == torch.float32 for layer in chunk.kv.layers for t in layer)


def test_all_chunks_but_the_first_are_computed_behind_the_stand_in(
    smollm2_engine: Engine, texts: list[str]
) -> None:
    stand_in = texts[3]
    blender = Blender(smollm2_engine.llm, stand_in=stand_in)
    assert blender.settings == BlendSettings()
    assert blender.stand_in == blender.token_ids([stand_in])[0]
    head = blender.frame.head
    chunks = blender.chunks(texts[:3])
    assert [chunk.context for chunk in chunks] == [head + blender.stand_in] * 3
    question, reuse = "What is the limit?", BlendSettings(recomp_ratio=0)

    # where the stand-in itself stands first, the second chunk's KV is exact, and the first's as well
    prompt = blender.prompt([blender.chunk(stand_in), chunks[0]], question)
    first, second = prompt.spans[1:]
    assert first.exact and second.exact
    full = suffix_logits(blender, prompt, blend=False)
    assert kl_divergence(full, suffix_logits(blender, prompt, settings=reuse)) < 1e-6
    # behind the head alone it is not
    plain = Blender(smollm2_engine.llm, stand_in="")
    assert plain.settings == NO_STAND_IN
    apart = plain.prompt(plain.chunks([stand_in, texts[0]]), question)
    assert kl_divergence(full, suffix_logits(plain, apart, settings=reuse)) > 1e-3

    # the first chunk's KV is computed once, and forgotten with the chunk
    number = len(blender._chunks)
    prompts = [blender.prompt(chunks, question) for _ in range(2)]
    assert prompts[0].spans[1].kv is prompts[1].spans[1].kv is not chunks[0].kv
    assert [span.kv for span in prompts[0].spans[2:]] == [chunk.kv for chunk in chunks[1:]]
    assert len(blender._chunks) == number + 1
    blender.forget(chunks[0])
    assert len(blender._chunks) == number - 1
    assert blender.contexts(3) == [head, head + blender.stand_in, head + blender.stand_in]

    # a text's own beginning takes the place of the stand-in
    (document,) = blender.chunks([texts[0]], before=["One two."])
    assert document.context == head + blender.token_ids(["One two."], separated=False)[0]
    with pytest.raises(ValueError, match="stand_in has 9000 tokens; allowed: "):
        Blender(smollm2_engine.llm, stand_in=[5] * 8999, separator="\n")
