"""Computes chunks' KV with an engine, and keeps it nowhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import EXTRA_ARG, BlendPlan, ChunkSpan, CollectPlan
from vllm_blend.core.prompt import TokenIds
from vllm_blend.core.static_scores import movement

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams


class ChunkCollector:
    """Runs of an in-process engine in which K and V are collected.

    A context is all token ids that a chunk is computed after.

    Args:
        llm: the engine.
        head: what every prompt begins with; its KV is computed now.
        other_text: gives a text of the kind that chunks are of. Scores tell how K and V move where it
            stands before a chunk, too.
        lora_request: vLLM's, of the adapter that all of them run with; None: the base model.
        adapter: its digest.

    Attributes:
        head_span: the head with its KV, which is exact; None: there is no head.
    """

    def __init__(
        self,
        llm: LLM,
        head: TokenIds,
        other_text: Callable[[], TokenIds],
        lora_request: Any = None,
        adapter: str = "",
    ) -> None:
        self._llm = llm
        self._lora_request, self._adapter = lora_request, adapter
        self._head = head
        self._other_text = other_text
        self._prefixes: dict[TokenIds, StoredKV] = {}
        self.head_span: ChunkSpan | None = None
        if head:
            (kv,) = self.collect([head], [()])
            self._prefixes[head] = kv
            self.head_span = ChunkSpan(0, kv, head, exact=True)

    def run(
        self,
        prompts: list[list[int]],
        params: Sequence[SamplingParams],
        plans: Sequence[BlendPlan | CollectPlan] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """vLLM's ``generate``, with a plan for each prompt or for none."""
        each = [one.clone() for one in params]
        for clone, plan in zip(each, plans or [], strict=plans is not None):
            clone.extra_args = (clone.extra_args or {}) | {EXTRA_ARG: plan}
        tokens: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        if not tokens:
            return []
        return self._llm.generate(tokens, each, use_tqdm=use_tqdm, lora_request=self._lora_request)

    def collect(
        self,
        chunks: Sequence[TokenIds],
        contexts: Sequence[TokenIds],
        use_tqdm: bool = False,
        *,
        prefixes: Mapping[TokenIds, StoredKV] | None = None,
    ) -> list[StoredKV]:
        """KV of chunks, each after its context.

        Args:
            prefixes: exact KV of some of these contexts, which is not computed again then.
        """
        from vllm import SamplingParams

        known = self._prefixes | dict(prefixes or {})
        plans = [CollectPlan(len(c), prefix=known.get(c), adapter=self._adapter) for c in contexts]
        prompts = [list(context + ids) for context, ids in zip(contexts, chunks, strict=True)]
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        self.run(prompts, [params] * len(prompts), plans, use_tqdm)
        return [StoredKV(tuple(plan.kv)) for plan in plans]

    def compute(
        self, chunks: Sequence[tuple[TokenIds, TokenIds]], scored: bool, use_tqdm: bool = False
    ) -> list[StoredKV]:
        """KV of chunks by context and token ids, with scores if they are asked for."""
        others = [(self._other_context(context), ids) for context, ids in chunks] if scored else []
        for context in dict.fromkeys(context for context, _ in others):
            if context and context not in self._prefixes:
                (self._prefixes[context],) = self.collect([context], [()])
        pairs = list(dict.fromkeys([*chunks, *others]))
        contexts, ids = [context for context, _ in pairs], [ids for _, ids in pairs]
        made = self.collect(ids, contexts, use_tqdm, prefixes=self._shared(contexts))
        found = dict(zip(pairs, made, strict=True))
        if not others:
            return made
        return [
            replace(found[pair], scores=movement(found[pair], found[other]))
            for pair, other in zip(chunks, others, strict=True)
        ]

    def _shared(self, contexts: Sequence[TokenIds]) -> dict[TokenIds, StoredKV]:
        """KV of contexts that more than one chunk has. Where one context begins with another, the
        other's is a part of its KV."""
        count = Counter(c for c in contexts if c and c not in self._prefixes)
        groups: list[list[TokenIds]] = []  # the longest first; it begins with the others
        for context in sorted(count, reverse=True):
            if not groups or groups[-1][0][: len(context)] != context:
                groups.append([])
            groups[-1].append(context)
        groups = [group for group in groups if sum(count[context] for context in group) > 1]
        whole = self.collect([group[0] for group in groups], [()] * len(groups))
        return {
            context: kv.tokens(0, len(context))
            for group, kv in zip(groups, whole, strict=True)
            for context in group
        }

    def _other_context(self, context: TokenIds) -> TokenIds:
        """The context of a chunk's second KV, which tells how its KV moves: the head alone, if its own
        has more; else the head and another text."""
        if context != self._head:
            return self._head
        return context + self._other_text()
