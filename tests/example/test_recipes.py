"""Ways to reuse chunks, on a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Engine
from hypothesis import given
from hypothesis import strategies as st
from recipes import Conversation, LongDocument, WarmUp, ask_many, warm_up, windows
from vllm import SamplingParams

from vllm_blend import Blender, BlendSettings
from vllm_blend.core.prompt import split
from vllm_blend.store import ChunkStore, DiskTier

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
ALL = BlendSettings(recomp_ratio=1.0)  # the same as full prefill
DOCUMENTS = [
    "Tolmere is a harbour town. Its bakery was founded by Ada Quill in 1911.",
    "The museum of Tolmere shows boats, nets and a clock that runs backwards.",
]


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def computed(blender: Blender) -> list[tuple[int, ...]]:
    """Grows by the chunks whose KV is computed; what they are computed after is not among them."""
    found: list[tuple[int, ...]] = []
    compute = blender.collector.compute

    def look(chunks: Any, *args: Any) -> Any:
        found.extend(ids for _, ids in chunks)
        return compute(chunks, *args)

    blender.collector.compute = look  # type: ignore[method-assign]
    return found


@given(st.integers(1, 500), st.integers(1, 60))
def test_pieces_are_whole_and_of_nearly_one_length(length: int, size: int) -> None:
    ids = tuple(range(length))
    parts = split(ids, size)
    assert sum(parts, ()) == ids
    lengths = {len(part) for part in parts}
    assert min(lengths) >= 1 and max(lengths) <= size and max(lengths) - min(lengths) <= 1


@given(st.integers(1, 200), st.integers(1, 20), st.data())
def test_windows_cover_every_chunk(count: int, width: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, width))
    found = windows(count, width, stride)
    assert found[0][0] == 0 and found[-1][1] == count
    assert {hi - lo for lo, hi in found} == {min(count, width)}
    for (lo, hi), (next_lo, next_hi) in zip(found, found[1:], strict=False):
        assert lo < next_lo <= hi < next_hi and next_lo - lo <= stride


def test_what_would_skip_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="stride is 3; allowed: 1 to window = 2"):
        windows(9, 2, 3)
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        split((1, 2), 0)


@pytest.mark.parametrize("chat", [True, False])
def test_a_conversation_is_the_template_s(smollm2_engine: Engine, chat: bool) -> None:
    """At ratio 1 each answer is that of a full prefill of the whole conversation."""
    blender = Blender(smollm2_engine.llm, ALL, chat=chat, stand_in="")
    talk = Conversation(blender, DOCUMENTS)
    made = computed(blender)
    questions = ["Who founded the bakery?", "When?", "What does the museum show?"]
    history = list(blender.frame.head) + [i for c in talk.documents for i in c.token_ids]
    for number, question in enumerate(questions):
        ids = blender.tokenizer.encode(question, add_special_tokens=False)
        output = talk.ask(question, GREEDY)
        history += [*ids, *blender.frame.tail]
        assert output.prompt_token_ids == history
        (expected,) = smollm2_engine.generate([history], 5)
        assert tokens(output) == expected
        assert len(made) == number + 1  # the turn alone, and no earlier one again
        history += [*tokens(output), *talk._between]
    if chat:
        text = blender.tokenizer.decode(history)
        assert text.count("<|im_start|>user\n") == 4 and text.count("<|im_end|>") == 7


def test_a_conversation_without_documents_forgets_its_oldest_turns(smollm2_engine: Engine) -> None:
    blender = Blender(smollm2_engine.llm, stand_in="")
    talk = Conversation(blender, max_prompt_tokens=150)
    for number in range(5):
        output = talk.ask(smollm2_engine.ids(30, number), GREEDY)
        assert len(output.prompt_token_ids) <= 150
    assert 0 < len(talk.turns) < 5
    with pytest.raises(ValueError, match="tokens; allowed: 150"):
        talk.ask(smollm2_engine.ids(151, 0))


def test_a_long_document_is_computed_once(smollm2_engine: Engine) -> None:
    blender = Blender(smollm2_engine.llm, ALL, stand_in="")
    made = computed(blender)
    ids = smollm2_engine.ids(230, 3)
    with pytest.raises(ValueError, match="stride is 4; allowed: 1 to window = 3"):
        LongDocument(blender, ids, chunk_tokens=40, window=3, stride=4)
    assert not made  # refused before anything is computed
    document = LongDocument(blender, ids, chunk_tokens=40, window=3, stride=2)
    question = smollm2_engine.ids(6, 4)
    answers = document.ask(question, GREEDY)
    assert [(a.start, a.end) for a in answers] == [(0, 3), (2, 5), (3, 6)]
    assert sum(made, ()) == tuple(ids)
    for answer in answers:
        part = [i for chunk in document.chunks[answer.start : answer.end] for i in chunk.token_ids]
        prompt = [*blender.frame.head, *part, *question, *blender.frame.tail]
        assert smollm2_engine.generate([prompt], 5) == [tokens(answer.output)]


def test_a_batch_has_a_shared_chunk_once(smollm2_engine: Engine, tmp_path: Path) -> None:
    a, b, c = (smollm2_engine.ids(30, seed) for seed in range(3))
    requests = [([a, b], "What?"), ([b, c], "Who?"), ([c, a, b], "Where?")]
    with ChunkStore([DiskTier(tmp_path, 1 << 30)], host_bytes=1 << 26) as store:
        blender = Blender(smollm2_engine.llm, stand_in="", store=store)
        made = computed(blender)
        outputs = ask_many(blender, requests, GREEDY)
        assert len(made) == 3
        assert store.flush()
        for ids in blender.token_ids([a, b, c]):
            store.discard(blender.key(ids))
        assert [tokens(o) for o in ask_many(blender, requests, GREEDY)] == [tokens(o) for o in outputs]
        assert len(made) == 3 and store.stats()["hits.disk"] == 3
    for (chunks, question), output in zip(requests, outputs, strict=True):
        prompt = blender.prompt(blender.chunks(chunks), question)
        assert output.prompt_token_ids == prompt.token_ids
        assert tokens(blender.generate(prompt, GREEDY)) == tokens(output)


def test_warm_up_goes_on_where_it_was_broken_off(smollm2_engine: Engine, tmp_path: Path) -> None:
    corpus = [smollm2_engine.ids(20, seed) for seed in range(12)]

    def broken_off() -> Any:
        yield from corpus[:7]
        raise KeyboardInterrupt

    with (
        ChunkStore([DiskTier(tmp_path, 1 << 30)], host_bytes=1 << 26) as store,
        pytest.raises(KeyboardInterrupt),
    ):
        warm_up(
            Blender(smollm2_engine.llm, stand_in="", store=store), broken_off(), batch=3, use_tqdm=False
        )
    with ChunkStore([DiskTier(tmp_path, 1 << 30)], host_bytes=1 << 26) as store:
        blender = Blender(smollm2_engine.llm, stand_in="", store=store)
        made = computed(blender)
        assert warm_up(blender, [*corpus, corpus[0]], batch=4) == WarmUp(6, 6, 0)
        assert len(made) == 6
        assert warm_up(blender, corpus, use_tqdm=False) == WarmUp(12, 0, 0)
    with pytest.raises(ValueError, match="the blender has no store"):
        warm_up(Blender(smollm2_engine.llm, stand_in=""), corpus)


def test_warm_up_ends_where_the_store_is_full(smollm2_engine: Engine, tmp_path: Path) -> None:
    corpus = [smollm2_engine.ids(20, seed) for seed in range(8)]
    with ChunkStore([DiskTier(tmp_path, 5_500_000)], host_bytes=1 << 20) as store:
        blender = Blender(smollm2_engine.llm, stand_in="", store=store)
        assert warm_up(blender, corpus, batch=2, use_tqdm=False) == WarmUp(0, 5, 3)
        assert "evictions.disk" not in store.stats()
        assert warm_up(blender, corpus, batch=2, use_tqdm=False) == WarmUp(5, 0, 3)
