"""The API server's side: a request's ``blend`` field checked, its figures counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_blend.core.plans import EXTRA_ARG
from vllm_blend.server.config import CONFIG_KEY, NO_STORE, ServerSettings
from vllm_blend.server.frontend import metrics
from vllm_blend.server.request import REPORT_KEY, SPANS_KEY, BlendRequest

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
        if field is not None:
            raise _refusal(
                f"blend is {type(field).__name__}, and this engine was not started to blend requests; "
                f"""start it with --additional-config '{{"{CONFIG_KEY}": {{}}}}', or give a """
                "BlendPlan to an LLM in this process"
            )
        return
    marked = prompt.get(SPANS_KEY, ()) if isinstance(prompt, dict) else ()
    spans = tuple((start, end) for start, end in marked)
    defaults = BlendRequest(
        spans=spans,
        auto=settings.auto,
        settings=settings.blend,
        paced=settings.paced,
        floor=settings.quality_floor,
    )
    params = request.sampling_params
    try:
        blend_request = BlendRequest.parse(field, defaults)
        if blend_request.paced and settings.store is None:
            raise ValueError(NO_STORE)
        if field is not None and not blend_request.off:
            check_can_blend(request)
        blend_request.settings.check_architecture([vllm_config.model_config.architecture])
        config = vllm_config.model_config.hf_text_config
        blend_request.check(len(request.prompt_token_ids or ()), config.num_hidden_layers)
        blend_request = blend_request.split(settings.max_chunk_tokens)
    except ValueError as error:
        raise _refusal(str(error)) from None
    wanted = (
        not blend_request.off and (blend_request.spans or blend_request.auto) and _can_blend(request)
    )
    extra_args = {k: v for k, v in (params.extra_args or {}).items() if k != EXTRA_ARG}
    params.extra_args = extra_args | ({EXTRA_ARG: blend_request.to_wire()} if wanted else {})


def check_can_blend(request: Any) -> None:
    """Raises ValueError if the request needs what a blended one cannot give."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise ValueError("blending needs a prompt of token ids; prompt_embeds cannot be blended")
    if request.sampling_params.prompt_logprobs is not None:
        raise ValueError(
            f"prompt_logprobs is {request.sampling_params.prompt_logprobs}; a blended or collected "
            "prompt has none, since not every prompt token is computed"
        )


def _can_blend(request: Any) -> bool:
    try:
        check_can_blend(request)
    except ValueError:
        return False
    return True


def count_reports(outputs: list[Any]) -> None:
    """Counts the engine's reports, and leaves in the outputs those that a client asked for."""
    for output in outputs:
        params = output.kv_transfer_params
        if params is None or REPORT_KEY not in params:
            continue
        report = dict(params[REPORT_KEY])
        labels = report.pop("labels")
        if report.pop("counts"):
            metrics.count(report, labels)
        if report.pop("asked"):
            output.kv_transfer_params = params | {REPORT_KEY: report}
        else:
            rest = {key: value for key, value in params.items() if key != REPORT_KEY}
            output.kv_transfer_params = rest or None


def _refusal(message: str) -> Exception:
    """What vLLM answers with HTTP status 400; a ValueError would be a server error (500)."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(message, parameter=EXTRA_ARG)
