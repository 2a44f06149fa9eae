"""Ways to reuse chunks, on top of ``Blender``: conversations, long documents, batches, warm-up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm_blend.api.blender import Blender
from vllm_blend.api.prompts import BlendPrompt, Chunk
from vllm_blend.core.prompt import TokenIds, between_turns, split, text_ids

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

Text = str | Sequence[int]


class Conversation:
    """A chat over documents. Each turn, question and answer, is a chunk of the turns after it.

    Its KV is computed once the answer is there, so the next question waits for its own tokens and the
    recomputed ones only. Where a prompt would be too long, the oldest turns are left out.

    Args:
        blender: the chat's turns are put together by its model's chat template, if it has one.
        documents: that every turn may look at.
        max_prompt_tokens: None: a prompt leaves a quarter of the model's length for the answer.
    """

    def __init__(
        self, blender: Blender, documents: Sequence[Text] = (), *, max_prompt_tokens: int | None = None
    ) -> None:
        self.blender = blender
        self.documents = blender.chunks(documents)
        self.turns: list[Chunk] = []
        longest: int = blender.llm.llm_engine.model_config.max_model_len
        self.max_prompt_tokens = max_prompt_tokens or longest * 3 // 4
        self._between = between_turns(blender.tokenizer) if blender.chat else blender.separator

    def ask(self, question: Text, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Answers the next question.

        Raises:
            ValueError: if the documents and the question alone are too long.
        """
        blender = self.blender
        ids = text_ids(blender.tokenizer, question, "question")
        prompt = self.prompt(ids)
        # the first turn has nothing to reuse where there are no documents
        blend = bool(self.documents or self.turns)
        output: RequestOutput = blender.generate(prompt, sampling_params, blend=blend)
        answer = tuple(output.outputs[0].token_ids)
        if answer and self._between and answer[-1] == self._between[0]:
            answer = answer[:-1]  # the end of the turn is part of what stands between two
        turn = ids + blender.frame.tail + answer + self._between
        self.turns += blender.chunks([turn], separated=False)
        return output

    def prompt(self, question: TokenIds) -> BlendPrompt:
        """The prompt of the next turn; forgets the oldest turns where it would be too long."""
        frame = self.blender.frame
        rest = [len(frame.head), len(frame.tail), len(question)]
        fixed = sum(rest) + sum(len(chunk.token_ids) for chunk in self.documents)
        if fixed > self.max_prompt_tokens:
            raise ValueError(
                f"documents and question have {fixed} tokens; allowed: {self.max_prompt_tokens}"
            )
        while fixed + sum(len(turn.token_ids) for turn in self.turns) > self.max_prompt_tokens:
            del self.turns[0]
        chunks = [*self.documents, *self.turns]
        if chunks:
            return self.blender.prompt(chunks, question)
        return BlendPrompt([*frame.head, *question, *frame.tail], ())


@dataclass(frozen=True)
class WindowAnswer:
    """What a question's answer is over chunks ``[start, end)`` of a document."""

    start: int
    end: int
    output: RequestOutput


class LongDocument:
    """A document longer than a prompt, asked window by window.

    The windows overlap; each chunk's KV is computed once, and stands in all windows that hold it.

    Args:
        text: of the document, or its token ids.
        chunk_tokens: of a chunk, at most.
        window: chunks of a prompt.
        stride: chunks from one window's start to the next one's.
        overlap: tokens before a chunk that it is computed after; see ``Blender.document``.
        use_tqdm: show the progress of computing the chunks.
    """

    def __init__(
        self,
        blender: Blender,
        text: Text,
        *,
        chunk_tokens: int = 256,
        window: int = 8,
        stride: int = 4,
        overlap: int = 128,
        use_tqdm: bool = False,
    ) -> None:
        self.blender = blender
        ids = text_ids(blender.tokenizer, text, "text")
        self.windows = windows(len(split(ids, chunk_tokens)), window, stride)
        self.chunks = blender.document(
            ids, chunk_tokens=chunk_tokens, overlap=overlap, separated=False, use_tqdm=use_tqdm
        )

    def ask(self, question: Text, sampling_params: SamplingParams | None = None) -> list[WindowAnswer]:
        """One answer a window, computed as one batch."""
        prompts = [self.blender.prompt(self.chunks[lo:hi], question) for lo, hi in self.windows]
        outputs = self.blender.generate(prompts, sampling_params)
        return [
            WindowAnswer(lo, hi, output) for (lo, hi), output in zip(self.windows, outputs, strict=True)
        ]


def windows(count: int, width: int, stride: int) -> list[tuple[int, int]]:
    """``[start, end)`` of windows over ``count`` chunks; the last one ends with the last chunk.

    Raises:
        ValueError: if a window is empty, or chunks would be skipped.
    """
    if not 1 <= stride <= width:
        raise ValueError(f"stride is {stride}; allowed: 1 to window = {width}")
    starts = range(0, max(count - width, 0) + stride, stride)
    found = [(min(start, max(count - width, 0)), min(start + width, count)) for start in starts]
    return list(dict.fromkeys(found))


def ask_many(
    blender: Blender,
    requests: Sequence[tuple[Sequence[Text], Text]],
    sampling_params: SamplingParams | None = None,
    *,
    use_tqdm: bool = False,
) -> list[RequestOutput]:
    """Answers questions over chunks as one batch; a chunk that several share is had once.

    Args:
        requests: each the texts of its chunks, and its question.
    """
    texts = [text for chunks, _ in requests for text in chunks]
    chunks = iter(blender.chunks(texts, use_tqdm=use_tqdm))
    prompts = [blender.prompt(list(islice(chunks, len(own))), question) for own, question in requests]
    outputs: list[RequestOutput] = blender.generate(prompts, sampling_params, use_tqdm=use_tqdm)
    return outputs


@dataclass(frozen=True)
class WarmUp:
    """Chunks of a corpus: already in the store, computed now, and left out because it is full."""

    found: int
    computed: int
    left_out: int


def warm_up(
    blender: Blender,
    texts: Iterable[Text],
    *,
    batch: int = 16,
    total: int | None = None,
    use_tqdm: bool = True,
) -> WarmUp:
    """Computes the chunks of a corpus for the store, before anybody asks for them.

    With a stand-in they are computed after it; for a prompt that begins with one it is computed again.
    Can be broken off and started again: what the store has is not computed. Ends computing where the
    corpus fills the store's largest tier, so that it does not push out its own beginning.

    Args:
        texts: of the chunks, or their token ids; the most wanted ones first.
        batch: chunks that are computed at once; they are written before the next ones begin.
        total: how many texts there are, for the progress bar, where they have no length.

    Raises:
        ValueError: if the blender has no store.
        RuntimeError: if the store does not get done with writing.
    """
    from tqdm import tqdm

    from vllm_blend.store.record import Layout

    store = blender.store
    if store is None:
        raise ValueError("the blender has no store; make it with Blender(llm, store=...)")
    room = store.budget_bytes
    seen: set[bytes] = set()
    counts = {"found": 0, "computed": 0, "left_out": 0}
    missing: list[TokenIds] = []

    def compute() -> None:
        blender.chunks(missing, separated=False)
        missing.clear()
        if not store.flush(600):
            raise RuntimeError("the store has not written a batch of chunks within ten minutes")

    bar: Any = tqdm(texts, total=total, unit="chunk", desc="Warm-up", disable=not use_tqdm)
    for text in bar:
        (ids,) = blender.token_ids([text])
        key = blender.key(ids)
        if key.digest in seen:
            continue
        size = Layout.of(key).num_bytes
        if size + 4096 > room:  # a file takes whole pages
            counts["left_out"] += 1
            continue
        seen.add(key.digest)
        room -= size + 4096
        if store.locate(key) is not None:
            counts["found"] += 1
            continue
        counts["computed"] += 1
        missing.append(ids)
        if len(missing) == batch:
            compute()
    if missing:
        compute()
    return WarmUp(**counts)
