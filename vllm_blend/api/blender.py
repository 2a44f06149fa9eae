"""The friendly door: chunks and a question in, an answer out; no flags.

blender = Blender(llm)
chunks = [blender.chunk(text) for text in documents]    # each chunk's KV is computed once
prompt = blender.prompt(chunks, "Who founded the bakery?")
print(blender.generate(prompt).outputs[0].text)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from vllm_blend.compat.engine_access import blend_model
from vllm_blend.core import stand_in, tensor_parallel
from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import EXTRA_ARG, BlendPlan, ChunkSpan, CollectPlan
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
from vllm_blend.core.static_scores import SCORING_TOKENS, movement

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

    from vllm_blend.store import ChunkKey, ChunkStore


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk's token ids, separator included, and their KV, computed behind ``context`` alone.

    Without KV it is computed with the prompt, like the question.
    """

    token_ids: TokenIds
    kv: StoredKV | None = field(repr=False)
    context: TokenIds = field(default=(), repr=False)


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

    A chunk's KV is computed behind the prompt's head alone (BOS, system message, chat template, and
    ``head``), as it will stand in prompts: behind nothing, a chunk's first token takes the attention
    that a prompt's first token gets, and answers suffer (docs/quality.md). With a stand-in, chunks that
    do not stand first in a prompt are computed behind that too. Without a store a chunk is kept in
    memory, under what it is computed behind and its token ids, until ``forget``. With one, it is looked
    up there before it is computed, and what is computed is put there.

    Args:
        llm: made with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
        settings: which tokens are recomputed; None: ``BlendSettings()``, without a stand-in
            ``NO_STAND_IN``.
        chat: put prompts into the model's chat template; None: if it has one.
        system: system message of the chat template; None: the template's default.
        head: what every prompt begins with behind BOS or the template's marks, such as an instruction;
            text (a separator follows it) or token ids (likewise). "": nothing.
        stand_in: a text of the kind that chunks are of, some 500 tokens, such as a few passages of the
            corpus; text (a separator follows it) or token ids (likewise). It stands in for the chunks
            before a chunk, so that stored KV is nearer to what the prompt makes of it. None: a text of
            our own, which is some way nearer; "": nothing.
        separator: text behind each chunk; it becomes part of the chunk.
        store: where chunks are kept; whoever made it closes it.
        salt: of the tenant whose chunks these are: others do not find them in the store.
        scored: compute each chunk behind something else once more, for the scores by which the policy
            ``"static"`` chooses its tokens; None: if the settings have that policy.

    Raises:
        RuntimeError: if the model cannot blend; says why.
        FileNotFoundError: if there is a store, and no weights to tell the model by.
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
        self._salt = salt
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
        self._prefixes: dict[TokenIds, StoredKV] = {}
        self._head = self._collect_head()

    def chunk(self, text: str | Sequence[int], *, head: str | Sequence[int] | None = None) -> Chunk:
        """The chunk of ``text`` (or token ids), with its KV; computed at first sight only."""
        return self.chunks([text], head=head)[0]

    def token_ids(
        self, texts: Sequence[str | Sequence[int]], *, separated: bool = True
    ) -> list[TokenIds]:
        """The token ids of chunks, each with the separator behind it unless ``separated`` is False."""
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
        """The text of our own that chunks are computed behind: as a stand-in, or for their scores."""
        room = self.llm.model_config.max_model_len // 4
        return text_ids(self.tokenizer, stand_in.text(), "text")[: min(SCORING_TOKENS, room)]

    def key(self, token_ids: TokenIds, context: TokenIds | None = None) -> ChunkKey:
        """What the store knows a chunk by.

        Args:
            token_ids: the separator is among them.
            context: all token ids that it is computed behind; None: the blender's head and stand-in.
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
            head: what they are computed behind instead of the blender's; "": the frame alone.
            before: for each, the end of what stands before it in its own text: it is computed behind
                the head and this; see ``document``. "": behind the head and the stand-in.
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
        """What the chunks of a prompt are computed behind, in their order: the first one the head, the
        others the stand-in too."""
        head = self.frame.head
        return [head if index == 0 else head + self.stand_in for index in range(num_chunks)]

    def obtain(
        self, wanted: Sequence[tuple[TokenIds, TokenIds]], use_tqdm: bool = False
    ) -> list[Chunk]:
        """Chunks by what they are computed behind and their own token ids: from memory, from the store,
        or computed now."""
        chunks = {pair: c for pair in wanted if (c := self._chunks.get(pair)) is not None}
        unknown = [pair for pair in dict.fromkeys(wanted) if pair not in chunks]
        chunks |= {(c.context, c.token_ids): c for c in self._look_up(unknown)}
        missing = [pair for pair in unknown if pair not in chunks]
        made = self._compute(missing, use_tqdm)
        for (context, key), kv in zip(missing, made, strict=True):
            chunks[context, key] = Chunk(key, kv, context)
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
        """The chunks of a long text, each computed behind the end of the one before it.

        A chunk from the middle of a text lacks what stands before it there. Computed behind that, it
        brings a prompt nearer to full prefill (docs/quality.md), which pays nothing for it.

        Args:
            text: or token ids.
            chunk_tokens: of a chunk, at most, without the separator; they are of nearly one length.
            overlap: tokens before a chunk in the text that it is computed behind, besides the head.
            head: what they are computed behind instead of the blender's; "": the frame alone.
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
            contexts: for each, all token ids that it is computed behind; None: the blender's head.
            prefixes: exact KV of some of these contexts, which is not computed again then.
        """
        contexts = [self.frame.head] * len(chunks) if contexts is None else contexts
        known = self._prefixes | dict(prefixes or {})
        plans = [CollectPlan(len(c), prefix=known.get(c)) for c in contexts]
        prompts = [list(context + ids) for context, ids in zip(contexts, chunks, strict=True)]
        self._run(prompts, [self._collect_params()] * len(prompts), plans, use_tqdm)
        return [StoredKV(tuple(plan.kv)) for plan in plans]

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
            chunks: computed behind any head; best behind this prompt's. For the first one, if it is
                computed behind the stand-in, its KV behind the head alone is taken, and computed where
                it is not there yet.
            question, answer: text or token ids; token ids.
            head: of this prompt instead of the blender's; it is computed with the prompt.

        Raises:
            ValueError: if there is no chunk, or the question is empty.
        """
        if not chunks:
            raise ValueError("chunks is empty; blending needs at least one chunk")
        token_ids = list(self.head_ids(head))
        spans = []
        first = chunks[0]
        if first.kv is not None and (behind := self._without_stand_in(first.context)) != first.context:
            chunks = [*self.obtain([(behind, first.token_ids)]), *chunks[1:]]
        if self._head is not None and self._head.token_ids == tuple(token_ids):
            spans.append(self._head)
        for chunk in chunks:
            if chunk.kv is not None:
                place, exact = len(token_ids), chunk.context == tuple(token_ids)
                spans.append(ChunkSpan(place, chunk.kv, chunk.token_ids, exact=exact))
            token_ids += chunk.token_ids
        token_ids += text_ids(self.tokenizer, question, "question")
        token_ids += self.frame.tail
        token_ids += answer
        return BlendPrompt(token_ids, tuple(spans))

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
        plans = [BlendPlan(p.spans, s) for p, s in zip(many, settings, strict=True)] if blend else None
        outputs = self._run([p.token_ids for p in many], each, plans, use_tqdm)
        return outputs[0] if isinstance(prompts, BlendPrompt) else outputs

    def _without_stand_in(self, context: TokenIds) -> TokenIds:
        """A context without the stand-in at its end, if it has it."""
        size = len(self.stand_in)
        return context[:-size] if size and context[-size:] == self.stand_in else context

    def _look_up(self, chunks: Sequence[tuple[TokenIds, TokenIds]]) -> list[Chunk]:
        """What the store has of these contexts and token ids."""
        if self.store is None:
            return []
        found = self.store.get_many([self.key(ids, context) for context, ids in chunks])
        all_ranks_have = tensor_parallel.all_reduce_min([kv is not None for kv in found])
        return [
            Chunk(ids, kv, context)
            for (context, ids), kv, there in zip(chunks, found, all_ranks_have, strict=True)
            if there
        ]

    def _compute(
        self, chunks: Sequence[tuple[TokenIds, TokenIds]], use_tqdm: bool = False
    ) -> list[StoredKV]:
        """KV of chunks by what they are computed behind and their token ids, scored if asked for."""
        others = [(self._other(context), ids) for context, ids in chunks] if self.scored else []
        for context in dict.fromkeys(context for context, _ in others):
            if context and context not in self._prefixes:
                (self._prefixes[context],) = self.collect([context], contexts=[()])
        pairs = list(dict.fromkeys([*chunks, *others]))
        contexts, ids = [context for context, _ in pairs], [ids for _, ids in pairs]
        made = self.collect(ids, use_tqdm, contexts=contexts, prefixes=self._shared(contexts))
        found = dict(zip(pairs, made, strict=True))
        if not others:
            return made
        return [
            replace(found[pair], scores=movement(found[pair], found[other]))
            for pair, other in zip(chunks, others, strict=True)
        ]

    def _shared(self, contexts: Sequence[TokenIds]) -> dict[TokenIds, StoredKV]:
        """KV of what more than one chunk is computed behind. Where one context begins with another, the
        other's is a part of its KV."""
        count = Counter(c for c in contexts if c and c not in self._prefixes)
        groups: list[list[TokenIds]] = []  # the longest first; it begins with the others
        for context in sorted(count, reverse=True):
            if not groups or groups[-1][0][: len(context)] != context:
                groups.append([])
            groups[-1].append(context)
        groups = [group for group in groups if sum(count[context] for context in group) > 1]
        whole = self.collect([group[0] for group in groups], contexts=[()] * len(groups))
        return {
            context: kv.tokens(0, len(context))
            for group, kv in zip(groups, whole, strict=True)
            for context in group
        }

    def _other(self, context: TokenIds) -> TokenIds:
        """What a chunk is computed behind once more, to see how its KV moves: the head alone, if there
        is more before it anyway; else a text of our own too."""
        if context != self.frame.head:
            return self.frame.head
        return context + self.own_text

    def _collect_head(self) -> ChunkSpan | None:
        """The head stands first in every prompt, so its KV, computed alone, is exact."""
        if not self.frame.head:
            return None
        (kv,) = self.collect([self.frame.head], contexts=[()])
        self._prefixes[self.frame.head] = kv
        return ChunkSpan(0, kv, self.frame.head, exact=True)

    @staticmethod
    def _collect_params() -> SamplingParams:
        from vllm import SamplingParams

        return SamplingParams(max_tokens=1, temperature=0, detokenize=False)

    def _run(
        self,
        prompts: list[list[int]],
        params: Sequence[SamplingParams],
        plans: Sequence[BlendPlan | CollectPlan] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = [one.clone() for one in params]
        for clone, plan in zip(each, plans or [], strict=plans is not None):
            clone.extra_args = (clone.extra_args or {}) | {EXTRA_ARG: plan}
        tokens: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        return self.llm.generate(tokens, each, use_tqdm=use_tqdm) if tokens else []
