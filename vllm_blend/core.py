"""The values that pass between the stages, and who fills each.

request  -> BlendPlan / CollectPlan     the user's door (``door.py``, ``blender.py``)
step     -> BlendStep of StepRequests   the runner's hook (``compat.py``), once a forward step
layer    -> Status, old_kv, metadata    the layer loop (``models/loop.py``)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

import torch

from vllm_blend.layers import BlockLayers, LayerKV
from vllm_blend.settings import BlendSettings

EXTRA_ARG = "blend"
"""The key of ``SamplingParams.extra_args`` that carries a request's plan, or its ``BlendRequest``."""


class Status(IntEnum):
    """What a layer does in a step; the names and numbers are those of the paper's code."""

    DECODE = -1  # new tokens on the paged cache: vLLM's own path
    FULL_PREFILL = 0  # all rows: vLLM's own path
    CHECK = 1  # compare fresh with stored V, choose the rows that go on
    AFTER_CHECK = 2  # chosen rows only, over the fused cache


WIDEST_LOAD = 16
"""Bytes that a GPU loads at once; KV that a kernel reads starts at a multiple of this."""


@dataclass(frozen=True)
class KVShape:
    """What stored KV must look like to fit a model (one tensor-parallel rank of it)."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    def of(self, num_tokens: int) -> tuple[int, int, int]:
        return (num_tokens, self.num_kv_heads, self.head_size)


@dataclass(frozen=True, eq=False)
class StoredKV:
    """The KV of consecutive tokens, computed once, layer by layer; never written to.

    Attributes:
        layers: K (before RoPE) and V of each layer, ``[num_tokens, num_kv_heads, head_size]``. Where
            they are still being loaded (``store/late.py``), ``layers[i]`` waits for layer ``i``; where
            they are kept in fp8 (``store/fp8.py``), it is widened.
        scores: how far each token's K and V move between two contexts (``select/static.py``),
            ``[num_tokens]`` float32 in the host's memory; None: they were computed in one only.
    """

    layers: Sequence[LayerKV]
    scores: torch.Tensor | None = None

    @property
    def described(self) -> Sequence[LayerKV]:
        """The layers' tensors for their shapes, types and devices; what they hold may come later."""
        return getattr(self.layers, "described", self.layers)

    @property
    def num_tokens(self) -> int:
        return self.described[0][0].shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.described)

    def has(self, layer: int) -> bool:
        """Whether ``layers[layer]`` is there without a wait."""
        return layer < getattr(self.layers, "arrived", len(self.layers))

    def addresses(self, start: int) -> torch.Tensor | None:
        """Where a GPU finds each layer's K and V of token ``start``, ``[num_layers, 2]`` int64.

        None where they must be copied first: they lie in the host's memory, or scattered, or come late.
        """
        if self.layers is not self.described:
            return None
        k = self.layers[0][0]
        return None if self._first is None else self._first + start * k.stride(0) * k.element_size()

    @cached_property
    def _first(self) -> torch.Tensor | None:
        """The addresses of token 0."""
        layers = self.layers
        if isinstance(layers, BlockLayers):
            first = layers[:1]
            sizes = [stride * layers.block.element_size() for stride in layers.block.stride()[:2]]
            if not _readable(first) or any(size % WIDEST_LOAD for size in sizes):
                return None
            index = torch.arange(len(layers))[:, None] * sizes[0] + torch.arange(2) * sizes[1]
            return layers.block.data_ptr() + index
        if not _readable(layers):
            return None
        return torch.tensor([[tensor.data_ptr() for tensor in layer] for layer in layers])

    def tokens(self, start: int, end: int) -> StoredKV:
        """The KV of tokens ``[start, end)`` of these; not copied. Waits for KV that comes late."""
        if (start, end) == (0, self.num_tokens):
            return self
        scores = None if self.scores is None else self.scores[start:end]
        if isinstance(self.layers, BlockLayers):
            return StoredKV(BlockLayers(self.layers.block[:, :, start:end]), scores)
        return StoredKV(tuple((k[start:end], v[start:end]) for k, v in self.layers), scores)

    def check(self, shape: KVShape, num_tokens: int, name: str = "old_kvs") -> None:
        """Raises ValueError, naming ``name`` and the shape, if this does not fit."""
        layers = self.described
        if len(layers) != shape.num_layers:
            raise ValueError(f"{name} has {len(layers)} layers; the model has {shape.num_layers}")
        expected = shape.of(num_tokens)
        if isinstance(layers, BlockLayers):
            layers = layers[:1]  # all have its shape and type
        for index, layer in enumerate(layers):
            if len(layer) != 2:
                raise ValueError(f"{name}[{index}] has {len(layer)} entries; expected [K, V]")
            for kind, tensor in zip("KV", layer, strict=True):
                if not isinstance(tensor, torch.Tensor):
                    raise ValueError(
                        f"{kind} of {name}[{index}] is {type(tensor).__name__}; expected a tensor"
                    )
                if tuple(tensor.shape) != expected:
                    raise ValueError(
                        f"{kind} of {name}[{index}] has shape {list(tensor.shape)}; expected "
                        f"[num_tokens, num_kv_heads, head_size] = {list(expected)}"
                    )
                if tensor.dtype != shape.dtype:
                    raise ValueError(
                        f"{kind} of {name}[{index}] is {tensor.dtype}; the model computes in "
                        f"{shape.dtype}"
                    )


def _readable(layers: Sequence[LayerKV]) -> bool:
    """Whether kernels can read all tensors of ``layers`` where they lie, by the widest loads."""
    for tensor in (tensor for layer in layers for tensor in layer):
        if not tensor.is_cuda or not tensor.is_contiguous():
            return False
        row_bytes = tensor.nbytes // max(len(tensor), 1)
        if tensor.data_ptr() % WIDEST_LOAD or row_bytes % WIDEST_LOAD:
            return False
    return True


@dataclass(frozen=True, eq=False)
class ChunkSpan:
    """Stored KV at a place of a prompt: it stands for the tokens ``[start, end)``.

    ``token_ids``, where known, are compared with the prompt's before the KV is used.
    ``exact``: it was computed behind just what stands before it here, so nothing is gained by computing
    it again.
    """

    start: int
    kv: StoredKV
    token_ids: tuple[int, ...] | None = None
    exact: bool = False

    @property
    def end(self) -> int:
        return self.start + self.kv.num_tokens


@dataclass(frozen=True, eq=False)
class BlendPlan:
    """What one request reuses. Immutable, so requests may share it (``n > 1``).

    ``timed``: measure its stages (``models/clock.py``).
    """

    spans: tuple[ChunkSpan, ...]
    settings: BlendSettings = field(default_factory=BlendSettings)
    timed: bool = False

    @cached_property
    def made(self) -> dict[str, torch.Tensor]:
        """What was derived of it once, for all of its windows (``select/early.py``)."""
        return {}

    def __deepcopy__(self, memo: object) -> BlendPlan:
        return self  # vLLM deep-copies sampling parameters; the KV is shared instead

    def check(self, prompt_token_ids: Sequence[int], shape: KVShape) -> None:
        """Raises ValueError if the plan does not fit the prompt or the model."""
        self.settings.check_num_layers(shape.num_layers)
        check_spans([(span.start, span.end) for span in self.spans], len(prompt_token_ids))
        for index, span in enumerate(self.spans):
            span.kv.check(shape, span.end - span.start, name=f"spans[{index}].kv")
            found = tuple(prompt_token_ids[span.start : span.end])
            if span.token_ids is not None and span.token_ids != found:
                raise ValueError(
                    f"spans[{index}] was computed for other tokens than the prompt has at "
                    f"[{span.start}, {span.end})"
                )


ChunkKey = bytes
"""Names a chunk's KV in a server's model process (``models/chunks.py``)."""


@dataclass(frozen=True)
class ChunkIds:
    """A server's chunk by what makes it.

    Attributes:
        tenant: only its requests find the chunk.
        context: token ids that its KV is computed behind.
    """

    tenant: str
    token_ids: tuple[int, ...]
    context: tuple[int, ...] = ()

    @property
    def shelf(self) -> tuple[str, tuple[int, ...]]:
        """What it has in common with others: whose they are, and what they are computed behind."""
        return self.tenant, self.context


@dataclass(frozen=True)
class KeyedSpan:
    """Prompt tokens ``[start, end)`` that are those of a chunk from ``offset`` on.

    ``exact`` is as in ``ChunkSpan``.
    """

    start: int
    end: int
    key: ChunkKey
    offset: int = 0
    exact: bool = False


@dataclass(frozen=True)
class KeyedPlan:
    """A ``BlendPlan`` that names its KV: what a scheduler can send to the model's process."""

    spans: tuple[KeyedSpan, ...]
    settings: BlendSettings = field(default_factory=BlendSettings)
    timed: bool = False


@dataclass(eq=False)
class CollectPlan:
    """A request whose KV is kept: rows from ``start`` on of its prompt.

    Attention fills ``kv`` window by window (``models/collect.py``); it is whole when the prefill is.

    Attributes:
        on_model: also leave it at ``self_attn.hack_kv``, as the paper's code does.
        key: keep it in the model's process under this key.
        chunk: what is kept, for a store's lower tiers.
        scored: ``key``'s KV is there, computed behind something else: keep only its tokens' scores.
        prefix: exact KV of the prompt's first tokens, which are not computed then; at most ``start``.
        as_written: keep K as attention writes it, rotated to its place.
    """

    start: int = 0
    on_model: bool = False
    num_prompt_tokens: int = 0
    kv: list[LayerKV] = field(default_factory=list)
    key: ChunkKey | None = None
    chunk: ChunkIds | None = None
    scored: bool = False
    prefix: StoredKV | None = None
    as_written: bool = False

    def __deepcopy__(self, memo: object) -> CollectPlan:
        return self  # the caller reads the result from this very object

    @property
    def spans(self) -> tuple[ChunkSpan, ...]:
        """What is not computed."""
        return () if self.prefix is None else (ChunkSpan(0, self.prefix, exact=True),)

    def check(self, prompt_token_ids: Sequence[int], shape: KVShape) -> None:
        self.num_prompt_tokens = len(prompt_token_ids)
        if not 0 <= self.start < self.num_prompt_tokens:
            raise ValueError(
                f"start is {self.start}; the prompt has {self.num_prompt_tokens} tokens, so "
                f"allowed: 0 to {self.num_prompt_tokens - 1}"
            )
        if self.prefix is not None:
            self.prefix.check(shape, self.prefix.num_tokens, name="prefix")
            if self.prefix.num_tokens > self.start:
                raise ValueError(
                    f"prefix has {self.prefix.num_tokens} tokens; allowed: {self.start} at most, "
                    "since the rows from start on are computed"
                )

    def write(self, layer: int, position: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep rows of layer ``layer`` that stand at ``position`` and after in the prompt."""
        if layer == len(self.kv):
            size = (self.num_prompt_tokens - self.start, *k.shape[1:])
            self.kv.append((k.new_empty(size), v.new_empty(size)))
        skip = max(self.start - position, 0)
        rows = min(len(k), self.num_prompt_tokens - position)
        if skip < rows:
            place = slice(position + skip - self.start, position + rows - self.start)
            self.kv[layer][0][place] = k[skip:rows]
            self.kv[layer][1][place] = v[skip:rows]


def check_spans(spans: Sequence[tuple[int, int]], num_prompt_tokens: int) -> None:
    """Raises ValueError unless the spans are non-empty, ascending, disjoint and leave a question.

    Args:
        spans: ``[start, end)`` of each chunk, as token positions of the prompt.
        num_prompt_tokens: length of the prompt.
    """
    if not spans:
        raise ValueError("spans is empty; blending needs at least one chunk")
    for index, (start, end) in enumerate(spans):
        if start < 0:
            raise ValueError(f"spans[{index}] starts at {start}; allowed: 0 or more")
        if end <= start:
            raise ValueError(f"spans[{index}] is [{start}, {end}): an empty chunk")
        if end > num_prompt_tokens:
            raise ValueError(
                f"spans[{index}] is [{start}, {end}): it runs past the prompt of "
                f"{num_prompt_tokens} tokens"
            )
    for index, ((_, end), (start, _)) in enumerate(pairwise(spans), start=1):
        if start < end:
            raise ValueError(
                f"spans[{index}] starts at {start}, before the end of spans[{index - 1}] at "
                f"{end}; spans must ascend and not overlap"
            )
    if spans[-1][1] == num_prompt_tokens:
        raise ValueError(
            "spans cover the prompt's last token; the question (at least one token) must follow "
            "the last chunk, since its logits are what the answer starts from"
        )


def behind_one_another(kvs: Sequence[LayerKV]) -> LayerKV:
    """K and V of some tokens, then of others; a single pair is not copied."""
    if len(kvs) == 1:
        return kvs[0]
    return torch.cat([k for k, _ in kvs]), torch.cat([v for _, v in kvs])


NOTHING_RECOMPUTED = BlendSettings(policy="static", recomp_ratio=0.0)


@dataclass(eq=False)
class StepRequest:
    """One request's window in a forward step: prompt positions ``[position, position + num_rows)``.

    Attributes:
        row: its first row in the step.
        request_id: vLLM's.
        num_prompt_tokens: a request that was preempted also prefills what it has answered so far,
            behind its prompt; None: this window ends with the prompt.
    """

    plan: BlendPlan | CollectPlan
    row: int
    position: int
    num_rows: int
    device: torch.device
    request_id: str = ""
    num_prompt_tokens: int | None = None

    @property
    def settings(self) -> BlendSettings:
        """Which of the rows that stored KV stands for are computed: of a collected prefix none."""
        return self.plan.settings if isinstance(self.plan, BlendPlan) else NOTHING_RECOMPUTED

    @property
    def end(self) -> int:
        """Prompt position behind its last row."""
        return self.position + self.num_rows

    @property
    def prompt_end(self) -> int:
        """The same, without rows of an answer."""
        return self.end if self.num_prompt_tokens is None else min(self.end, self.num_prompt_tokens)

    @cached_property
    def windows(self) -> list[tuple[ChunkSpan, int, int]]:
        """Spans with stored KV in this window: ``(span, first, last + 1)`` as prompt positions."""
        found = [(s, max(s.start, self.position), min(s.end, self.end)) for s in self.plan.spans]
        return [window for window in found if window[1] < window[2]]

    @property
    def num_chunk_rows(self) -> int:
        """Rows that stored KV stands for."""
        return sum(end - start for _, start, end in self.windows)

    @cached_property
    def chunk_rows(self) -> torch.Tensor:
        """Rows of the step that stored KV stands for, ascending, ``[num_chunk_rows]`` int64."""
        return self.chunk_rows_on(self.device)

    def chunk_rows_on(self, device: torch.device) -> torch.Tensor:
        """``chunk_rows`` on any device."""
        shift = self.row - self.position
        return torch.cat(
            [torch.arange(lo + shift, hi + shift, device=device) for _, lo, hi in self.windows]
        )

    def old_kv(self, layer: int) -> LayerKV:
        """Stored K and V of ``chunk_rows`` at one layer, each ``[num_chunk_rows, ...]``; not copied
        where one span holds them all."""
        parts = []
        for span, lo, hi in self.windows:
            k, v = span.kv.layers[layer]
            parts.append((k[lo - span.start : hi - span.start], v[lo - span.start : hi - span.start]))
        return behind_one_another(parts)


@dataclass(eq=False)
class BlendStep:
    """One forward step in which at least one request blends or is collected.

    Attributes:
        requests: those requests; the other rows of the step are computed as always.
        starts: first row of each of the step's requests, then ``num_rows``.
        kv_cache_dtype: vLLM's name for the paged cache's type.
    """

    requests: list[StepRequest]
    starts: Sequence[int]
    kv_cache_dtype: str

    @property
    def num_rows(self) -> int:
        """Rows of the step, without padding."""
        return self.starts[-1]

    @cached_property
    def blended(self) -> list[StepRequest]:
        """Requests with stored KV in this step."""
        return [request for request in self.requests if request.windows]

    @cached_property
    def collected(self) -> list[StepRequest]:
        """Requests whose KV is kept."""
        return [r for r in self.requests if isinstance(r.plan, CollectPlan)]
