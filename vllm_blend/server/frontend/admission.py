"""The API server's side: a request's ``blend`` field checked, its figures counted."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_blend.compat.support import check_policy
from vllm_blend.core.plans import EXTRA_ARG
from vllm_blend.server.chunks.chunk_registry import bytes_per_token
from vllm_blend.server.config import CONFIG_KEY, NO_STORE, ServerSettings
from vllm_blend.server.frontend import metrics
from vllm_blend.server.request import (
    APPROXIMATE,
    REPORT_KEY,
    ROWS_KEY,
    SIZES,
    SPANS_KEY,
    WHY_NOT_KEY,
    WITH_MEDIA,
    BlendRequest,
    Span,
    sign,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def admit(vllm_config: VllmConfig, request: Any, field: Any, prompt: Any) -> None:
    """Replaces a new request's ``blend`` field by its validated form, the marked chunks included.

    Args:
        vllm_config: the engine's.
        request: vLLM's ``EngineCoreRequest``.
        field: the client's ``blend`` field, or None.
        prompt: vLLM's rendered prompt; marked chunks are in it.

    Raises:
        VLLMValidationError: names what is wrong with the field.
    """
    settings = ServerSettings.of(vllm_config)
    if settings is None:
        return _refuse_any(field)
    rendered = prompt if isinstance(prompt, dict) else {}
    spans = tuple((start, end) for start, end in rendered.get(SPANS_KEY, ()))
    params = request.sampling_params
    blend_request = parse(settings, field, spans, rendered.get(WHY_NOT_KEY, ""))
    try:
        if field is not None and not blend_request.off:
            check_can_blend(request)
    except ValueError as error:
        raise _refusal(str(error)) from None
    _check(vllm_config, blend_request, len(request.prompt_token_ids or ()))
    blend_request = blend_request.split(settings.max_chunk_tokens)
    blend_request = _without_large(blend_request, vllm_config, settings)
    asks = blend_request.spans or blend_request.auto or blend_request.report
    wanted = not blend_request.off and asks and _can_blend(request)
    extra_args = {k: v for k, v in (params.extra_args or {}).items() if k != EXTRA_ARG}
    params.extra_args = extra_args | ({EXTRA_ARG: blend_request.to_wire()} if wanted else {})


def check_early(vllm_config: VllmConfig, field: Any, num_tokens: int) -> None:
    """Refuses a wrong field once a prompt is rendered: later its answer may have begun to stream.

    Args:
        vllm_config: the engine's.
        field: the client's ``blend`` field, or None.
        num_tokens: of the prompt.

    Raises:
        VLLMValidationError: names what is wrong with the field.
    """
    settings = ServerSettings.of(vllm_config)
    if settings is None:
        return _refuse_any(field)
    if field is not None:
        _check(vllm_config, parse(settings, field), num_tokens)


def _check(vllm_config: VllmConfig, blend_request: BlendRequest, num_tokens: int) -> None:
    model_config = vllm_config.model_config
    try:
        blend_request.settings.check_architecture([model_config.architecture])
        check_policy(vllm_config, blend_request.settings)
        blend_request.check(num_tokens, model_config.hf_text_config.num_hidden_layers)
    except ValueError as error:
        raise _refusal(str(error)) from None


def _refuse_any(field: Any) -> None:
    """Refuses a field where the engine was not started to blend."""
    if field is not None:
        raise _refusal(
            f"blend is {type(field).__name__}, and this engine was not started to blend requests; "
            f"""start it with --additional-config '{{"{CONFIG_KEY}": {{}}}}', or give a """
            "BlendPlan to an LLM in this process"
        )


def parse(
    settings: ServerSettings, field: Any, spans: tuple[Span, ...] = (), why_not: str = ""
) -> BlendRequest:
    """What a request asks for.

    Args:
        settings: the server's.
        field: the client's ``blend`` field, or None.
        spans: of the chunks that are marked in its text.
        why_not: why not all of them have one; empty: they have.

    Raises:
        VLLMValidationError: names what is wrong with the field.
    """
    defaults = BlendRequest(
        spans=spans,
        auto=settings.auto,
        settings=settings.blend,
        paced=settings.paced,
        floor=settings.quality_floor,
        parts=settings.parts,
        separator=settings.separator,
        why_not=why_not,
    )
    try:
        found = BlendRequest.parse(field, defaults, settings.client_limits)
        if found.paced and settings.store is None:
            raise ValueError(NO_STORE)
    except ValueError as error:
        raise _refusal(str(error)) from None
    return found


def _without_large(
    blend_request: BlendRequest, vllm_config: VllmConfig, settings: ServerSettings
) -> BlendRequest:
    """The request without chunks that are larger than all memory for chunks: they are never known."""
    largest = settings.chunk_bytes // bytes_per_token(vllm_config)
    spans = tuple((start, end) for start, end in blend_request.spans if end - start <= largest)
    if spans == blend_request.spans:
        return blend_request
    memory = "ram_gb" if settings.store is None else "host_gb of store"
    why_not = f"chunks are larger than the memory for them, {largest} tokens ({memory})"
    return replace(blend_request, spans=spans, why_not=why_not)


def check_can_blend(request: Any) -> None:
    """Raises ValueError if the request needs what a blended one cannot give."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise ValueError("blending needs a prompt of token ids; prompt_embeds cannot be blended")
    if request.sampling_params.prompt_logprobs is not None:
        raise ValueError(
            f"prompt_logprobs is {request.sampling_params.prompt_logprobs}; a blended or collected "
            "prompt has none, since not every prompt token is computed"
        )


def keep_brought_apart(request: Any) -> None:
    """Gives a request whose KV comes blended from another engine a cache salt of its own, so that no
    exact request finds it through the prefix cache."""
    brought = (request.sampling_params.extra_args or {}).get("kv_transfer_params")
    if isinstance(brought, dict) and brought.get(APPROXIMATE):
        request.cache_salt = f"{request.cache_salt or ''}blend-{uuid.uuid4().hex}"


def check_text_alone(request: Any) -> None:
    """Raises ValueError if the request has images, audio or video."""
    if request.mm_features:
        raise ValueError(f"this request cannot be blended: {WITH_MEDIA}")


def _can_blend(request: Any) -> bool:
    try:
        check_can_blend(request)
    except ValueError:
        return False
    return True


def count_reports(outputs: list[Any], states: Mapping[str, Any]) -> None:
    """Counts the engine's reports; leaves in the outputs what clients are told.

    A client that asked has its report, any other whose request was blended a ``sign``.

    Args:
        states: vLLM's ``RequestState`` of each unfinished request, by its id.
    """
    for output in outputs:
        params = output.kv_transfer_params
        if params is None or REPORT_KEY not in params:
            continue
        report = dict(params[REPORT_KEY])
        labels = report.pop("labels", ())
        if report.pop("counts", False):
            metrics.count(report, labels)
        asked = report.pop("asked", False)
        told = _with_rows(report, states.get(output.request_id)) if asked else sign(report)
        if not report.pop("tells_sizes", False):
            told = {key: value for key, value in told.items() if key not in SIZES}
        rest = {key: value for key, value in params.items() if key != REPORT_KEY}
        output.kv_transfer_params = (rest | {REPORT_KEY: told} if told else rest) or None


def _with_rows(report: dict[str, Any], state: Any) -> dict[str, Any]:
    """A report with what only the first one of its request tells; any may be the last."""
    if state is None:  # it was aborted
        return report
    if ROWS_KEY in report:
        state.blend_rows = report[ROWS_KEY]
    return report | {ROWS_KEY: getattr(state, "blend_rows", [])}


def _refusal(message: str) -> Exception:
    """What vLLM answers with HTTP status 400; a ValueError would be a server error (500)."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(message, parameter=EXTRA_ARG)
