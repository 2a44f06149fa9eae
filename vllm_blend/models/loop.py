"""The layer loop of a step that blends or collects.

Stock decoder layers do not care how many rows they get: what depends on a row's position they look
up in vLLM's forward context. So the loop calls the stock layers, with all rows before the check layer
(status 0) and with the chosen rows from it on (status 1 and 2), under a context that describes those
rows. Stored KV travels in that context's attention metadata to the backend, which fuses it into the
paged cache: loop -> layer -> attention -> backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from vllm_blend import compat, compat_cuda
from vllm_blend.attention import blend_impl
from vllm_blend.core import BlendStep, KVShape, Status
from vllm_blend.door import CacheFuseMetadata
from vllm_blend.models.chunks import ChunkKV
from vllm_blend.models.clock import StageClock
from vllm_blend.models.collect import collecting
from vllm_blend.models.frame import Frame
from vllm_blend.models.load import InFlight
from vllm_blend.models.pinned import PinnedMemory
from vllm_blend.models.tiers import Tiers
from vllm_blend.ranks import num_ranks, of_first
from vllm_blend.select import View, choose_rows, num_kept
from vllm_blend.server.config import ServerSettings
from vllm_blend.server.mail import News

if TYPE_CHECKING:
    from vllm_blend.models.graph import AfterCheckGraphs, Replay


class BlendModel(torch.nn.Module):
    """Mixin for vLLM's inner models (``LlamaModel`` and its kin).

    Attributes:
        cache_fuse_metadata: the flags of the paper's code (``door.py``).
        old_kvs: stored ``[K, V]`` of each layer, for ``cache_fuse_metadata["check"]``.
        kv_shape: what stored KV must look like here.
        unsupported: why this engine cannot blend, or None.
        blend_step: set by the runner's hook for a step that blends or collects, else None.
        fusable_ops: vLLM's ops that a blend step runs in their CUDA form.
        chunks: a server's chunks.
        graphs: CUDA graphs of the layers after the check, where the engine uses graphs.
        clocks: of the steps since they were last asked for.
        in_flight: stored KV that the GPU may still be reading.
    """

    # of vLLM's inner models
    layers: Any
    start_layer: int
    end_layer: int
    norm: Any
    embed_input_ids: Any

    cache_fuse_metadata: CacheFuseMetadata
    old_kvs: list[Any] | None
    kv_shape: KVShape
    unsupported: str | None
    blend_step: BlendStep | None
    fusable_ops: list[Any]
    chunks: ChunkKV
    graphs: AfterCheckGraphs | None
    clocks: list[StageClock]
    in_flight: InFlight

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if self.blend_step is None:
            return super().__call__(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        with compat_cuda.fused_ops(self.fusable_ops if hidden.is_cuda else None):
            output = self.blend(hidden, positions, self.blend_step)
        if hidden.is_cuda:
            self.in_flight.hold(self.blend_step, hidden.device)
        self.chunks.keep(self.blend_step)
        return output

    def take_news(self) -> Callable[[], News] | None:
        """What there is to tell the scheduler, to be called once the step has ended."""
        self.in_flight.release()
        clocks, self.clocks = self.clocks, []
        told = self.chunks.take_news()
        if told is None and not clocks:
            return None

        def news() -> News:
            found = told or News()
            for clock in clocks:
                found.seconds |= clock.seconds()
            return found

        return news

    def blend(self, hidden: torch.Tensor, positions: torch.Tensor, step: BlendStep) -> torch.Tensor:
        """Runs the layers; returns ``[num_tokens, hidden_size]``, 0 in rows that were not computed."""
        output = torch.zeros_like(hidden)
        residual: torch.Tensor | None = None
        frame = Frame(step, positions, get_forward_context(), len(self.layers), self.chunks.drift)
        replay: Replay | None = None

        for index, layer in enumerate(islice(self.layers, self.start_layer, self.end_layer)):
            attn, status, fusion = layer.self_attn.attn, frame.status(index), None
            if status == Status.CHECK:
                assert residual is not None  # a check layer is never layer 0
                with frame.clock.stage("select"):
                    take = choose(frame, index, self.layers, hidden, residual, self.graphs)
                hidden, residual = hidden[take], residual[take]
                self.cache_fuse_metadata.record(frame)
                if self.graphs is not None:
                    replay = self.graphs.prepare(frame, index, hidden, residual)
            if status >= Status.CHECK:
                fusion = frame.fusion(index, attn, status, self.cache_fuse_metadata)
                if index == self.end_layer - 1:
                    assert residual is not None
                    take = keep_kv_only(frame, layer, hidden, residual)
                    hidden, residual = hidden[take], residual[take]
            if fusion is not None and replay is not None and index in replay.layers:
                frame.fuse(attn, fusion)
                hidden, residual = replay.run(index)
            elif frame.rows.numel():
                with frame.context(attn, fusion), collecting(frame, index, layer.self_attn):
                    hidden, residual = layer(frame.positions, hidden, residual)
            elif fusion is not None:  # a window of chunked prefill may hold reused tokens alone
                frame.fuse(attn, fusion)
            frame.stored.done(index)

        if frame.rows.numel():
            hidden, _ = self.norm(hidden, residual)
            output[frame.rows] = hidden[: frame.rows.numel()]
        self.clocks.append(frame.clock)
        return output


def choose(
    frame: Frame,
    index: int,
    layers: Sequence[Any],
    hidden: torch.Tensor,
    residual: torch.Tensor,
    graphs: AfterCheckGraphs | None,
) -> torch.Tensor:
    """Chooses rows at check layer ``index``, by each request's policy; returns the frame's rows that go
    on."""
    kept = {}
    for request in frame.step.blended:
        if index not in request.settings.check_layers:
            continue
        view = View(frame, request, layers, index, hidden, residual, graphs)
        count = num_kept(request.settings.ratio_at(index), request.chunk_rows.numel())
        kept[request] = view.chunk_index[of_first(choose_rows(view, count))]
    return frame.shrink(kept)


def keep_kv_only(
    frame: Frame, layer: Any, hidden: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """Nothing reads the last layer's output at chunk tokens: writes their K and V, and drops them.

    Returns the frame's rows that go on.
    """
    at = torch.cat([frame.candidates(request)[0] for request in frame.kept])
    if at.numel():
        normed, _ = layer.input_layernorm(hidden[at], residual[at])
        with frame.writing(layer.self_attn.attn, at):
            layer.self_attn(positions=frame.positions[at], hidden_states=normed)
    return frame.narrow(at)


def enable_blending(
    model: torch.nn.Module, blend_class: type[BlendModel], vllm_config: VllmConfig
) -> None:
    """Makes vLLM's inner model ``model`` a ``blend_class``, in place.

    Where the engine's settings cannot blend, the model stays on vLLM's own path: a warning says so at
    start-up, and a request that asks for blending is refused with the same sentence.

    Raises:
        ValueError: if blending was asked for in ``additional_config={"vllm_blend": {...}}`` and the
            engine's settings cannot blend.
    """
    model.__class__ = blend_class
    assert isinstance(model, BlendModel)
    model.cache_fuse_metadata = CacheFuseMetadata()
    model.old_kvs = None
    model.blend_step = None
    model.chunks = ChunkKV()
    model.graphs = None
    model.clocks = []
    model.in_flight = InFlight()
    model.fusable_ops = compat_cuda.fusable_ops(model.layers)
    model.unsupported = compat.why_unsupported(vllm_config)
    if model.unsupported is None:
        model.unsupported = prepare_layers(model, vllm_config)
    settings = ServerSettings.of(vllm_config)
    if settings is not None and model.unsupported is None:
        if settings.store is not None:
            model.chunks.tiers = Tiers.open(settings.store, vllm_config, model.kv_shape)
        if vllm_config.device_config.device_type == "cuda":
            # with a store only what it cannot take, and the start-up check's, goes here
            num_bytes = settings.chunk_bytes if settings.store is None else 0
            model.chunks.memory = PinnedMemory(num_bytes // num_ranks())
    if model.unsupported is not None:
        compat.report_unsupported(vllm_config, model.unsupported)
    compat.install_model_hooks(model, vllm_config)


def prepare_layers(model: Any, vllm_config: VllmConfig) -> str | None:
    """Gives each layer's attention its blend path; returns why that cannot be, or None."""
    attns = [layer.self_attn.attn for layer in model.layers]
    if reason := compat.why_attention_unsupported(attns):
        return reason
    try:
        impls = [blend_impl(attn.attn_backend.get_name()) for attn in attns]
    except ValueError as error:
        return str(error)
    for layer, impl in zip(model.layers, impls, strict=True):
        layer.self_attn.attn.impl.__class__ = impl
        layer.self_attn.attn.impl.rotary_emb = layer.self_attn.rotary_emb
        layer.self_attn.hack_kv = None
    model.kv_shape = KVShape(
        num_layers=len(attns),
        num_kv_heads=attns[0].num_kv_heads,
        head_size=attns[0].head_size,
        dtype=vllm_config.model_config.dtype,
    )
    if compat_cuda.uses_graphs(vllm_config) and all(hasattr(i, "at") for i in impls):
        from vllm_blend.models.graph import AfterCheckGraphs

        scheduler = vllm_config.scheduler_config
        model.graphs = AfterCheckGraphs(
            model.layers,
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            ahead=ServerSettings.of(vllm_config) is not None,
        )
    return None
