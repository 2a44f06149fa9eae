"""An attention backend for vLLM on xformers, the one that the paper's code patched, and its blend path.

``--attention-backend XFORMERS``: a name of vLLM's CUSTOM member (``compat/cuda.py``). A step is split
into spans of consecutive requests (``xformers_parts.py``):

- prefills run in ``memory_efficient_attention``: over their own K and V where they have no earlier
  keys, else over K and V gathered from the paged cache;
- decodes, speculated tokens, short tails of a prompt, and the kept rows of a blend (status 1 and 2) run
  in our ``sparse_attention``, which reads the paged cache where it is, with exact positions from the
  device. xformers' own paged decode would need equal numbers of rows, 16-bit types, one physical order
  of the cache, and lengths on the host; a single kernel for all of these has one thing to get right. It
  does not split a long context over programs, so decoding a few long prompts is slower than with
  FLASH_ATTN.

With ``mask="bottom_right"`` a blended request's kept rows go through xformers with
``LowerTriangularFromBottomRightMask``, as in the paper's code, for comparison.

xformers takes no output tensor and knows no paged cache here, so outputs are copied once, and K and V
of prompts with earlier keys once a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
    max_decode_query_len,
)

from vllm_blend.attention.base import ComputedRows, RowPlaces, last_keys
from vllm_blend.attention.paged import PagedFuse
from vllm_blend.attention.xformers_parts import (
    MAX_KEYS,
    SHORT,
    MaskedPart,
    PagedPart,
    Span,
    Way,
    build_part,
    split,
    split_kept,
)
from vllm_blend.core.plans import BlendPlan
from vllm_blend.ops import sparse_attention as sparse


def why_unusable() -> str | None:
    """Why xformers cannot run here, as a sentence, or None."""
    if not current_platform.is_cuda():
        return "XFORMERS needs an NVIDIA GPU"
    if find_spec("xformers") is None:
        return "xformers is not installed: pip install xformers"
    try:
        import xformers.ops
    except ImportError as error:
        return f"xformers cannot be imported: {error}"
    if not getattr(xformers._cpp_lib, "_built_with_cuda", True):
        return (
            "xformers cannot load its CUDA library (python -m xformers.info tells more); version "
            "0.0.35 wants CUDA 12's runtime: pip install nvidia-cuda-runtime-cu12"
        )
    return None


class XFormersBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "XFORMERS"

    @staticmethod
    def get_impl_cls() -> type[XFormersImpl]:
        return XFormersImpl

    @staticmethod
    def get_builder_cls() -> type[XFormersMetadataBuilder]:
        return XFormersMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # masks are made from the host's lengths

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= DeviceCapability(8, 0)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Also says what would do, where the checks above only say what would not."""
        if not cls.supports_head_size(head_size):
            return f"head_size is {head_size}; XFORMERS takes multiples of 8 up to 256"
        if not cls.supports_kv_cache_dtype(kv_cache_dtype) or (
            kv_cache_dtype not in (None, "auto") and getattr(torch, kv_cache_dtype) != dtype
        ):
            return f"kv_cache_dtype is {kv_cache_dtype}; XFORMERS takes the model's own, {dtype}"
        if dtype == torch.float32 and device_capability > DeviceCapability(9, 0):
            return "xformers computes float32 on compute capability 8.0 to 9.0 only"
        return None

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        reason = why_unusable()
        reasons: list[str] = super().validate_configuration(*args, **kwargs)
        return reasons if reason is None else [reason, *reasons]


@dataclass
class XFormersMetadata:
    """A step's requests, or their kept rows.

    Attributes:
        num_actual_tokens: rows, without padding.
        query_start_loc: first row of each request, then the number of rows, ``[num_reqs + 1]``.
        seq_lens: ``[num_reqs]``.
        block_table: ``[num_reqs, max_num_blocks]``.
        slot_mapping: ``[num_actual_tokens]``.
        starts: ``query_start_loc`` of the whole step on the host.
        spans: how the rows are split.
        positions: last key that each kept row sees, ``[num_actual_tokens]``; None: rows are the last
            tokens of their requests.
        active: the rows that are computed, in a step that blends.
    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    starts: list[int]
    spans: list[Span]
    positions: torch.Tensor | None = None
    active: ComputedRows | None = None
    _parts: dict[int, list[PagedPart | MaskedPart]] = field(default_factory=dict)

    def parts(self, window: int, block_size: int) -> list[PagedPart | MaskedPart]:
        """The spans on the device; made once a step and window, which layers may differ in."""
        if window not in self._parts:
            self._parts[window] = [build_part(self, span, window, block_size) for span in self.spans]
        return self._parts[window]


class XFormersMetadataBuilder(AttentionMetadataBuilder[XFormersMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    """Spans and masks depend on the host's lengths; vLLM then captures what lies between attentions."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)  # so decodes are one span
        # lengths of speculated tokens on the host are bounds: their requests have to be PAGED
        self.short = max(SHORT, max_decode_query_len(vllm_config))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> XFormersMetadata:
        common = common_attn_metadata
        num_reqs = common.num_reqs
        starts = common.query_start_loc_cpu[: num_reqs + 1].tolist()
        seq_lens = common.seq_lens_cpu_upper_bound
        if seq_lens is None:
            seq_lens = common.seq_lens
        query_lens = [end - start for start, end in zip(starts, starts[1:], strict=False)]
        return XFormersMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            starts=starts,
            spans=split(query_lens, seq_lens[:num_reqs].tolist(), self.short),
        )


class XFormersImpl(PagedFuse, AttentionImpl[XFormersMetadata]):
    """Attention on xformers; in a blend, fuses stored KV into the paged cache before it attends."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        refused = {
            "ALiBi": alibi_slopes is not None,
            "a soft cap of logits": bool(logits_soft_cap),
            "layers that share the KV cache of another layer": kv_sharing_target_layer_name is not None,
            f"attention type {attn_type}": attn_type != AttentionType.DECODER,
            f"kv_cache_dtype {kv_cache_dtype}": kv_cache_dtype
            not in XFormersBackend.supported_kv_cache_dtypes,
        }
        if found := [name for name, there in refused.items() if there]:
            raise NotImplementedError(
                f"attention backend XFORMERS does not support {', '.join(found)}; choose another one"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.num_queries_per_kv = self.num_heads // self.num_kv_heads
        self.window = sliding_window or 0
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        config = get_current_vllm_config_or_none()
        longest = (
            0 if config is None or config.model_config is None else config.model_config.max_model_len
        )
        self.max_keys = max(MAX_KEYS, longest)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: XFormersMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of all rows.

        Args:
            layer: vLLM's ``Attention``.
            query: ``[num_tokens, num_heads, head_size]``; rows past ``num_actual_tokens`` are padding.
            key, value: ``[num_tokens, num_kv_heads, head_size]``; in the cache already.
            kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.
            output: written, ``[num_tokens, num_heads, head_size]``.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("XFORMERS does not quantize its output")
        if attn_metadata is None:
            if not kv_cache.numel():  # vLLM measures memory: let it see what may be gathered
                key.new_empty(self.max_keys, self.num_kv_heads, 2 * self.head_size)
            return output.fill_(0)
        self.join(layer, query, key, value, attn_metadata)
        key_cache, value_cache = self.caches(kv_cache)
        for part in attn_metadata.parts(self.window, key_cache.shape[1]):
            if isinstance(part, PagedPart):
                sparse.run(
                    query[part.rows],
                    key_cache,
                    value_cache,
                    part.positions,
                    part.query_start_loc,
                    part.block_table,
                    output[part.rows],
                    self.scale,
                    self.window,
                )
                continue
            k, v = key[part.rows], value[part.rows]
            if part.keys is not None:
                k, v = kv_cache.transpose(1, 2)[part.keys].split(self.head_size, dim=-1)
            output[part.rows] = self.masked(query[part.rows], k, v, part.mask)
        return output

    def masked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        """``memory_efficient_attention``, ``[num_rows, num_heads, head_size]``; K and V not copied.

        Args:
            q: ``[num_rows, num_heads, head_size]``.
            k, v: ``[num_keys, num_kv_heads, head_size]``.
            mask: xformers' ``attn_bias``.
        """
        from xformers.ops import memory_efficient_attention

        group = self.num_queries_per_kv
        size = q.shape
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        if group > 1:  # [1, num_rows, num_kv_heads, group, head_size]
            q = q.unflatten(2, (self.num_kv_heads, group))
            k = k.unsqueeze(3).expand(-1, -1, -1, group, -1)
            v = v.unsqueeze(3).expand(-1, -1, -1, group, -1)
        return memory_efficient_attention(q, k, v, attn_bias=mask, scale=self.scale).reshape(size)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes K and V, ``[num_tokens, num_kv_heads, head_size]``, to their slots."""
        key_cache, value_cache = self.caches(kv_cache)
        ops.reshape_and_cache_flash(
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            self.kv_cache_dtype,
            layer._k_scale,
            layer._v_scale,
        )

    def at(
        self,
        metadata: XFormersMetadata,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        block_table: torch.Tensor,
    ) -> XFormersMetadata:
        """The metadata for other rows: last key of each, first row and blocks of each request."""
        num_rows, num_reqs = positions.shape[0], block_table.shape[0]
        return replace(
            metadata,
            num_actual_tokens=num_rows,
            query_start_loc=query_start_loc,
            block_table=block_table,
            spans=[Span(Way.PAGED, slice(0, num_reqs), slice(0, num_rows), (), ())],
            positions=positions,
            _parts={},
        )

    @staticmethod
    def metadata(attn: Any, stock: XFormersMetadata, places: RowPlaces) -> XFormersMetadata:
        step, rows, query_start_loc = places.step, places.rows, places.query_start_loc
        positions = last_keys(stock, places)
        bottom_right = {
            stock.starts.index(request.row): request.position + request.num_rows
            for request in step.requests
            if isinstance(request.plan, BlendPlan) and request.plan.settings.mask == "bottom_right"
        }
        if bottom_right:
            spans = split_kept(query_start_loc.tolist(), bottom_right)  # waits: for comparison only
        else:
            num_reqs = len(stock.starts) - 1
            spans = [Span(Way.PAGED, slice(0, num_reqs), slice(0, rows.numel()), (), ())]
        return XFormersMetadata(
            num_actual_tokens=rows.numel(),
            query_start_loc=query_start_loc,
            seq_lens=stock.seq_lens,
            block_table=stock.block_table,
            slot_mapping=stock.slot_mapping[rows],
            starts=stock.starts,
            spans=spans,
            positions=positions,
        )
