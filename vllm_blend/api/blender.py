"""The friendly door: chunks and a question in, an answer out; no flags.

blender = Blender(llm)
chunks = [blender.chunk(text) for text in documents]    # each chunk's KV is computed once
prompt = blender.prompt(chunks, "Who founded the bakery?")
print(blender.generate(prompt).outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from vllm_blend.api.collector import ChunkCollector
from vllm_blend.api.prompts import BlendPrompt, Chunk
from vllm_blend.compat.engine_access import blend_model
from vllm_blend.core import stand_in, tensor_parallel
from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan
from vllm_blend.core.prompt import (
    PromptFrame,
    TokenIds,
    chat_frame,
    head_ids,
    plain_frame,
    split,
    text_ids,
)
from vllm_blend.core.settings import NO_STAND_IN, BlendSettings
from vllm_blend.core.static_scores import SCORING_TOKENS
from vllm_blend.store.adapters import shelf

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

    from vllm_blend.store import ChunkKey, ChunkStore


class Blender:
    """Reuses chunks in prompts of one in-process ``vllm.LLM``.

    A chunk's KV is computed after the prompt's head alone (BOS, system message, chat template, and
    ``head``), as it will stand in prompts: after nothing, a chunk's first token takes the attention
    that a prompt's first token gets, and answers suffer (docs/quality.md). With a stand-in, chunks that
    do not stand first in a prompt are computed after head and stand-in. All token ids that a chunk is
    computed after are its context. Without a store a chunk is kept in memory, under its context and its
    token ids, until ``forget``. With one, it is looked up there before it is computed, and what is
    computed is put there.

    Args:
        llm: made with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
        settings: which tokens are recomputed; None: ``BlendSettings()``, without a stand-in
            ``NO_STAND_IN``.
        chat: put prompts into the model's chat template; None: if it has one.
        system: system message of the chat template; None: the template's default.
        head: what every prompt begins with after BOS or the template's marks, such as an instruction;
            text (a separator follows it) or token ids (likewise). "": nothing.
        stand_in: a text of the kind that chunks are of, some 500 tokens, such as a few passages of the
            corpus; text (a separator follows it) or token ids (likewise). It stands in for the chunks
            before a chunk, so that stored KV is nearer to what the prompt makes of it. None: a text of
            our own, which helps a small model (docs/quality.md); "": nothing.
        separator: text after each chunk; it becomes part of the chunk.
        store: where chunks are kept; whoever made it closes it.
        salt: of the tenant whose chunks these are: others do not find them in the store.
        scored: compute each chunk with another context once more, for the scores by which the policy
            ``"static"`` chooses its tokens; None: if the settings have that policy.
        lora_request: vLLM's, of the LoRA adapter that computes chunks and answers; None: the base model
            does. An engine may have a blender for each adapter.

    Raises:
        RuntimeError: if the model cannot blend; says why.
        FileNotFoundError: if there is a store, and no weights to tell the model by; or no files of the
            adapter.
        ValueError: if ``chat`` is True and there is no template, or if head and stand-in leave no room
            for a chunk.

    Attributes:
        stand_in: its token ids.
    """

    def __init__(
        self,
        llm: LLM,
        settings: BlendSettings | None = None,
        *,
        chat: bool | None = None,
        system: str | None = None,
        head: str | Sequence[int] = "",
        stand_in: str | Sequence[int] | None = None,
        separator: str = "\n\n",
        store: ChunkStore | None = None,
        salt: str = "",
        scored: bool | None = None,
        lora_request: Any = None,
    ) -> None:
        self.llm = llm
        self.model = blend_model(llm)
        without = stand_in is not None and not len(stand_in)
        self.settings = settings or (NO_STAND_IN if without else BlendSettings())
        self.settings.check_num_layers(self.model.blending.kv_shape.num_layers)
        self.tokenizer = llm.get_tokenizer()
        if chat is None:
            chat = bool(getattr(self.tokenizer, "chat_template", None))
        if system is not None and not chat:
            raise ValueError("system is set, but chat is False; make it the head instead")
        self.chat = chat
        self._around = chat_frame(self.tokenizer, system) if chat else plain_frame(self.tokenizer)
        self.separator = text_ids(self.tokenizer, separator, "separator") if separator else ()
        self.frame = PromptFrame(self.head_ids(head), self._around.tail)
        self.stand_in: TokenIds = ()
        if not without:
            text = self.own_text if stand_in is None else stand_in
            self.stand_in = text_ids(self.tokenizer, text, "stand_in") + self.separator
            room = llm.model_config.max_model_len - len(self.frame.head) - 2
            if len(self.stand_in) > room:
                raise ValueError(f"stand_in has {len(self.stand_in)} tokens; allowed: {room} at most")
        self.store = store
        self.adapter = self.model.blending.adapters.digest(lora_request)
        self._salt = shelf(salt, self.adapter)
        # with a store, what nobody uses is its business
        self._chunks: MutableMapping[tuple[TokenIds, TokenIds], Chunk] = (
            {} if store is None else WeakValueDictionary()
        )
        if store is not None:
            from vllm_blend.store import model_key

            self._model_key = model_key(
                llm.llm_engine.vllm_config,
                self.model.blending.kv_shape,
                tensor_parallel.rank(),
                storage=store.storage,
                checksum_key=store.checksum_key,
            )
        self.scored = "static" in self.settings.policies if scored is None else scored
        self.collector = ChunkCollector(
            llm, self.frame.head, lambda: self.own_text, lora_request, self.adapter
        )

    def chunk(self, text: str | Sequence[int], *, head: str | Sequence[int] | None = None) -> Chunk:
        """The chunk of ``text`` (or token ids), with its KV; computed at first sight only."""
        return self.chunks([text], head=head)[0]

    def token_ids(
        self, texts: Sequence[str | Sequence[int]], *, separated: bool = True
    ) -> list[TokenIds]:
        """The token ids of chunks, each followed by the separator unless ``separated`` is False."""
        separator = self.separator if separated else ()
        return [
            text_ids(self.tokenizer, text, f"chunk {i}") + separator for i, text in enumerate(texts)
        ]

    def head_ids(self, head: str | Sequence[int] | None) -> TokenIds:
        """All token ids before a prompt's first chunk; None: with the blender's own head."""
        if head is None:
            return self.frame.head
        return head_ids(self.tokenizer, self._around, head, self.separator)

    @cached_property
    def own_text(self) -> TokenIds:
        """The text of our own in contexts: as a stand-in, or for scores."""
        room = self.llm.model_config.max_model_len // 4
        return text_ids(self.tokenizer, stand_in.text(), "text")[: min(SCORING_TOKENS, room)]

    def key(self, token_ids: TokenIds, context: TokenIds | None = None) -> ChunkKey:
        """What the store knows a chunk by.

        Args:
            token_ids: the separator is among them.
            context: None: the blender's head and stand-in.
        """
        context = self.frame.head + self.stand_in if context is None else context
        return self._model_key.chunk(token_ids, context, self._salt)

    def chunks(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        head: str | Sequence[int] | None = None,
        before: Sequence[str | Sequence[int]] | None = None,
        separated: bool = True,
        use_tqdm: bool = False,
    ) -> list[Chunk]:
        """Like ``chunk``, for many in one batch.

        Args:
            texts: or token ids.
            head: in their contexts, instead of the blender's; "": the frame alone.
            before: for each, the end of what stands before it in its own text: its context is the head
                and this; see ``document``. "": the head and the stand-in.
            separated: the separator follows each, and is part of it.
            use_tqdm: shows vLLM's progress bar.

        Raises:
            ValueError: if there are not as many ``before`` as texts.
        """
        ids = self.token_ids(texts, separated=separated)
        if before is None:
            before = [()] * len(ids)
        elif len(before) != len(ids):
            raise ValueError(f"before has {len(before)} entries for {len(ids)} texts")
        start = self.head_ids(head)
        contexts = [
            start + (text_ids(self.tokenizer, text, f"before {i}") if len(text) else self.stand_in)
            for i, text in enumerate(before)
        ]
        return self.obtain(list(zip(contexts, ids, strict=True)), use_tqdm)

    def contexts(self, num_chunks: int) -> list[TokenIds]:
        """The contexts of a prompt's chunks, in their order: of the first one the head, of the others
        head and stand-in."""
        head = self.frame.head
        return [head if index == 0 else head + self.stand_in for index in range(num_chunks)]

    def obtain(
        self, wanted: Sequence[tuple[TokenIds, TokenIds]], use_tqdm: bool = False
    ) -> list[Chunk]:
        """Chunks by context and token ids: from memory, from the store, or computed now."""
        chunks = {pair: c for pair in wanted if (c := self._chunks.get(pair)) is not None}
        unknown = [pair for pair in dict.fromkeys(wanted) if pair not in chunks]
        chunks |= {(c.context, c.token_ids): c for c in self._look_up(unknown)}
        missing = [pair for pair in unknown if pair not in chunks]
        made = self.collector.compute(missing, self.scored, use_tqdm)
        for (context, key), kv in zip(missing, made, strict=True):
            chunks[context, key] = Chunk(key, kv, context, self.adapter)
            if self.store is not None:
                self.store.put(self.key(key, context), kv)
        self._chunks.update(chunks)
        return [chunks[pair] for pair in wanted]

    def document(
        self,
        text: str | Sequence[int],
        *,
        chunk_tokens: int = 512,
        overlap: int = 128,
        head: str | Sequence[int] | None = None,
        separated: bool = True,
        use_tqdm: bool = False,
    ) -> list[Chunk]:
        """The chunks of a long text, each computed after the end of the one before it.

        A chunk from the middle of a text lacks what stands before it there. Computed after that, it
        brings a prompt nearer to full prefill (docs/quality.md), which pays nothing for it.

        Args:
            text: or token ids.
            chunk_tokens: of a chunk, at most, without the separator; they are of nearly one length.
            overlap: tokens before a chunk in the text that its context has, besides the head.
            head: in their contexts, instead of the blender's; "": the frame alone.
            separated: the separator follows the last.
            use_tqdm: shows vLLM's progress bar.

        Raises:
            ValueError: if ``chunk_tokens`` is not positive, or ``overlap`` is negative.
        """
        if overlap < 0:
            raise ValueError(f"overlap is {overlap}; allowed: 0 or more")
        ids = text_ids(self.tokenizer, text, "text")
        parts = split(ids, chunk_tokens)
        starts = accumulate(map(len, parts[:-1]), initial=0)
        before = [ids[max(start - overlap, 0) : start] for start in starts]
        if separated:
            parts[-1] += self.separator
        return self.chunks(parts, head=head, before=before, separated=False, use_tqdm=use_tqdm)

    def collect(
        self,
        chunks: Sequence[TokenIds],
        use_tqdm: bool = False,
        *,
        contexts: Sequence[TokenIds] | None = None,
        prefixes: Mapping[TokenIds, StoredKV] | None = None,
    ) -> list[StoredKV]:
        """Computes the KV of chunks, and keeps it nowhere.

        Args:
            contexts: one for each; None: the blender's head.
            prefixes: exact KV of some of these contexts, which is not computed again then.
        """
        contexts = [self.frame.head] * len(chunks) if contexts is None else contexts
        return self.collector.collect(chunks, contexts, use_tqdm, prefixes=prefixes)

    def forget(self, chunk: Chunk) -> None:
        """Drops a chunk's KV from this object; the KV is freed with its last reference.

        A store keeps it.
        """
        self._chunks.pop((chunk.context, chunk.token_ids), None)
        self._chunks.pop((self._without_stand_in(chunk.context), chunk.token_ids), None)

    def prompt(
        self,
        chunks: Sequence[Chunk],
        question: str | Sequence[int],
        answer: Sequence[int] = (),
        *,
        head: str | Sequence[int] | None = None,
    ) -> BlendPrompt:
        """Head, chunks in this order, question, tail; then ``answer``, to go on from its token ids.

        Args:
            chunks: with any head in their contexts; best with this prompt's. For the first one, if the
                stand-in is in its context, its KV after the head alone is taken, and computed where it
                is not there yet.
            question, answer: text or token ids; token ids.
            head: of this prompt instead of the blender's; it is computed with the prompt.

        Raises:
            ValueError: if there is no chunk, the question is empty, or a chunk is another adapter's.
        """
        if not chunks:
            raise ValueError("chunks is empty; blending needs at least one chunk")
        token_ids = list(self.head_ids(head))
        spans = []
        first = chunks[0]
        if first.kv is not None and (context := self._without_stand_in(first.context)) != first.context:
            chunks = [*self.obtain([(context, first.token_ids)]), *chunks[1:]]
        head_span = self.collector.head_span
        if head_span is not None and head_span.token_ids == tuple(token_ids):
            spans.append(head_span)
        for index, chunk in enumerate(chunks):
            if chunk.adapter != self.adapter:
                raise ValueError(
                    f"chunks[{index}] was computed with adapter {chunk.adapter!r}; allowed: chunks of "
                    f"this blender's, {self.adapter!r}"
                )
            if chunk.kv is not None:
                place, exact = len(token_ids), chunk.context == tuple(token_ids)
                spans.append(ChunkSpan(place, chunk.kv, chunk.token_ids, exact=exact))
            token_ids += chunk.token_ids
        token_ids += text_ids(self.tokenizer, question, "question")
        token_ids += self.frame.tail
        token_ids += answer
        return BlendPrompt(token_ids, tuple(spans), self.adapter)

    def generate(
        self,
        prompts: BlendPrompt | Sequence[BlendPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        settings: BlendSettings | Sequence[BlendSettings] | None = None,
        blend: bool = True,
        use_tqdm: bool = False,
    ) -> Any:
        """Generates with vLLM, reusing the prompts' chunks.

        Args:
            prompts: one, or several to run as one batch.
            sampling_params: vLLM's, or one for each prompt; None: the model's defaults.
            settings: for these prompts, instead of the blender's; or one for each of them.
            blend: False runs the same token ids as full prefill, to compare.

        Returns:
            vLLM's ``RequestOutput``, or a list of them for several prompts.

        Raises:
            ValueError: if there are not as many settings, or sampling parameters, as prompts.
        """
        many = [prompts] if isinstance(prompts, BlendPrompt) else list(prompts)
        params = sampling_params or self.llm.get_default_sampling_params()
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise ValueError(f"sampling_params has {len(each)} entries for {len(many)} prompts")
        if settings is None or isinstance(settings, BlendSettings):
            settings = [settings or self.settings] * len(many)
        elif len(settings) != len(many):
            raise ValueError(f"settings has {len(settings)} entries for {len(many)} prompts")
        pairs = zip(many, settings, strict=True)
        plans = [BlendPlan(p.spans, s, adapter=p.adapter) for p, s in pairs] if blend else None
        outputs = self.collector.run([p.token_ids for p in many], each, plans, use_tqdm)
        return outputs[0] if isinstance(prompts, BlendPrompt) else outputs

    def _without_stand_in(self, context: TokenIds) -> TokenIds:
        """A context without the stand-in at its end, if it has it."""
        size = len(self.stand_in)
        return context[:-size] if size and context[-size:] == self.stand_in else context

    def _look_up(self, chunks: Sequence[tuple[TokenIds, TokenIds]]) -> list[Chunk]:
        """What the store has of these contexts and token ids, on all ranks.

        A part that another rank lacks is removed: all parts of a chunk come from one computation.
        """
        if self.store is None:
            return []
        keys = [self.key(ids, context) for context, ids in chunks]
        found = self.store.get_many(keys)
        all_ranks_have = tensor_parallel.all_reduce_min([kv is not None for kv in found])
        for key, kv, there in zip(keys, found, all_ranks_have, strict=True):
            if kv is not None and not there:
                self.store.purge(key)
        return [
            Chunk(ids, kv, context, self.adapter)
            for (context, ids), kv, there in zip(chunks, found, all_ranks_have, strict=True)
            if there
        ]
