"""The friendly door: chunks and a question in, an answer out; no flags.

blender = Blender(llm)
chunks = [blender.chunk(text) for text in documents]    # each chunk's KV is computed once
prompt = blender.prompt(chunks, "Who founded the bakery?")
print(blender.generate(prompt).outputs[0].text)
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from vllm_blend.compat import blend_model
from vllm_blend.core import EXTRA_ARG, BlendPlan, ChunkSpan, CollectPlan, StoredKV
from vllm_blend.prompt import Frame, TokenIds, chat_frame, plain_frame, text_ids
from vllm_blend.settings import BlendSettings

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

    from vllm_blend.store import ChunkKey, ChunkStore


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk's token ids, separator included, and their KV, computed behind the head alone.

    Without KV it is computed with the prompt, like the question.
    """

    token_ids: TokenIds
    kv: StoredKV | None = field(repr=False)


@dataclass(frozen=True)
class BlendPrompt:
    """Token ids of a prompt, and where its chunks stand in it."""

    token_ids: list[int]
    spans: tuple[ChunkSpan, ...]

    @property
    def num_reused(self) -> int:
        """Tokens that stored KV stands for."""
        return sum(span.end - span.start for span in self.spans)


class Blender:
    """Reuses chunks in prompts of one in-process ``vllm.LLM``.

    A chunk's KV is computed behind the prompt's head (BOS, system message, chat template), as it will
    stand in prompts. Without a store it is kept in memory under its token ids until ``forget``. With
    one, a chunk is looked up there before it is computed, and what is computed is put there.

    Args:
        llm: made with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
        settings: which tokens are recomputed; see ``BlendSettings``.
        chat: put prompts into the model's chat template; None: if it has one.
        system: system message of the chat template; None: the template's default.
        separator: text behind each chunk; it becomes part of the chunk.
        store: where chunks are kept; whoever made it closes it.
        salt: of the tenant whose chunks these are: others do not find them in the store.

    Raises:
        RuntimeError: if the model cannot blend; says why.
        FileNotFoundError: if there is a store, and no weights to tell the model by.
        ValueError: if ``chat`` is True and there is no template.
    """

    def __init__(
        self,
        llm: LLM,
        settings: BlendSettings | None = None,
        *,
        chat: bool | None = None,
        system: str | None = None,
        separator: str = "\n\n",
        store: ChunkStore | None = None,
        salt: str = "",
    ) -> None:
        self.llm = llm
        self.model = blend_model(llm)
        self.settings = settings or BlendSettings()
        self.settings.check_num_layers(self.model.kv_shape.num_layers)
        self.tokenizer = llm.get_tokenizer()
        if chat is None:
            chat = bool(getattr(self.tokenizer, "chat_template", None))
        if system is not None and not chat:
            raise ValueError("system is set, but chat is False; put it into the question instead")
        self.chat = chat
        self.frame: Frame = chat_frame(self.tokenizer, system) if chat else plain_frame(self.tokenizer)
        self.separator = text_ids(self.tokenizer, separator, "separator") if separator else ()
        self.store = store
        self._salt = salt
        # with a store, what nobody uses is its business
        self._chunks: MutableMapping[TokenIds, Chunk] = {} if store is None else WeakValueDictionary()
        if store is not None:
            from vllm_blend.store import model_key

            self._model_key = model_key(
                llm.llm_engine.vllm_config, self.model.kv_shape, storage=store.storage
            )
        self._head = self._collect_head()

    def chunk(self, text: str | Sequence[int]) -> Chunk:
        """The chunk of ``text`` (or token ids), with its KV; computed at first sight only."""
        return self.chunks([text])[0]

    def token_ids(
        self, texts: Sequence[str | Sequence[int]], *, separated: bool = True
    ) -> list[TokenIds]:
        """The token ids of chunks, each with the separator behind it unless ``separated`` is False."""
        separator = self.separator if separated else ()
        return [
            text_ids(self.tokenizer, text, f"chunk {i}") + separator for i, text in enumerate(texts)
        ]

    def key(self, token_ids: TokenIds) -> ChunkKey:
        """What the store knows a chunk by; the separator is among its token ids."""
        return self._model_key.chunk(token_ids, self.frame.head, self._salt)

    def chunks(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        separated: bool = True,
        use_tqdm: bool = False,
    ) -> list[Chunk]:
        """Like ``chunk``, for many in one batch."""
        ids = self.token_ids(texts, separated=separated)
        chunks = {key: chunk for key in ids if (chunk := self._chunks.get(key)) is not None}
        unknown = [key for key in dict.fromkeys(ids) if key not in chunks]
        chunks |= {key: Chunk(key, kv) for key, kv in self._look_up(unknown).items()}
        missing = [key for key in unknown if key not in chunks]
        for key, kv in zip(missing, self.collect(missing, use_tqdm), strict=True):
            chunks[key] = Chunk(key, kv)
            if self.store is not None:
                self.store.put(self.key(key), kv)
        self._chunks.update(chunks)
        return [chunks[key] for key in ids]

    def forget(self, chunk: Chunk) -> None:
        """Drops a chunk's KV from this object; the KV is freed with its last reference.

        A store keeps it.
        """
        self._chunks.pop(chunk.token_ids, None)

    def prompt(
        self,
        chunks: Sequence[Chunk],
        question: str | Sequence[int],
        answer: Sequence[int] = (),
    ) -> BlendPrompt:
        """Head, chunks in this order, question, tail; then ``answer``, to go on from its token ids.

        Raises:
            ValueError: if there is no chunk, or the question is empty.
        """
        if not chunks:
            raise ValueError("chunks is empty; blending needs at least one chunk")
        token_ids = list(self.frame.head)
        spans = [] if self._head is None else [self._head]
        for chunk in chunks:
            if chunk.kv is not None:
                spans.append(ChunkSpan(len(token_ids), chunk.kv, chunk.token_ids))
            token_ids += chunk.token_ids
        token_ids += text_ids(self.tokenizer, question, "question")
        token_ids += self.frame.tail
        token_ids += answer
        return BlendPrompt(token_ids, tuple(spans))

    def generate(
        self,
        prompts: BlendPrompt | Sequence[BlendPrompt],
        sampling_params: SamplingParams | None = None,
        *,
        settings: BlendSettings | None = None,
        blend: bool = True,
        use_tqdm: bool = False,
    ) -> Any:
        """Generates with vLLM, reusing the prompts' chunks.

        Args:
            prompts: one, or several to run as one batch.
            sampling_params: vLLM's; None: the model's defaults.
            settings: for these prompts, instead of the blender's.
            blend: False runs the same token ids as full prefill, to compare.

        Returns:
            vLLM's ``RequestOutput``, or a list of them for several prompts.
        """
        many = [prompts] if isinstance(prompts, BlendPrompt) else list(prompts)
        params = sampling_params or self.llm.get_default_sampling_params()
        plans = [BlendPlan(p.spans, settings or self.settings) for p in many] if blend else None
        outputs = self._run([p.token_ids for p in many], params, plans, use_tqdm)
        return outputs[0] if isinstance(prompts, BlendPrompt) else outputs

    def _look_up(self, chunks: list[TokenIds]) -> dict[TokenIds, StoredKV]:
        """What the store has of these chunks."""
        if self.store is None:
            return {}
        found = self.store.get_many([self.key(ids) for ids in chunks])
        return {ids: kv for ids, kv in zip(chunks, found, strict=True) if kv is not None}

    def _collect_head(self) -> ChunkSpan | None:
        """The head stands first in every prompt, so its KV, computed alone, is exact."""
        if not self.frame.head:
            return None
        plan = CollectPlan()
        self._run([list(self.frame.head)], self._collect_params(), [plan], use_tqdm=False)
        return ChunkSpan(0, StoredKV(tuple(plan.kv)), self.frame.head)

    def collect(self, chunks: Sequence[TokenIds], use_tqdm: bool = False) -> list[StoredKV]:
        """Computes the KV of chunks, and keeps it nowhere."""
        head = list(self.frame.head)
        plans = [CollectPlan(start=len(head)) for _ in chunks]
        prompts = [head + list(ids) for ids in chunks]
        self._run(prompts, self._collect_params(), plans, use_tqdm)
        return [StoredKV(tuple(plan.kv)) for plan in plans]

    @staticmethod
    def _collect_params() -> SamplingParams:
        from vllm import SamplingParams

        return SamplingParams(max_tokens=1, temperature=0, detokenize=False)

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        plans: Sequence[BlendPlan | CollectPlan] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = [params.clone() for _ in prompts]
        for clone, plan in zip(each, plans or [], strict=plans is not None):
            clone.extra_args = (clone.extra_args or {}) | {EXTRA_ARG: plan}
        tokens: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        return self.llm.generate(tokens, each, use_tqdm=use_tqdm) if tokens else []
