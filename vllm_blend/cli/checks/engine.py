"""What an engine with these arguments would refuse, and what is known of its model; none is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_blend.attention import BACKENDS
from vllm_blend.cli.checks.finding import Finding, note, ok, wrong
from vllm_blend.cli.checks.install import host_memory
from vllm_blend.cli.engine_args import engine_config, first_line, parse
from vllm_blend.cli.settings import unframed
from vllm_blend.compat.support import why_unsupported
from vllm_blend.server.chunks.chunk_registry import bytes_per_token
from vllm_blend.server.config import CONFIG_KEY, ServerSettings

CROWDED = 0.8
"""Share of the machine's memory that chunks may take."""


def serve_settings(arguments: Sequence[str]) -> dict[str, Any] | None:
    """What stands under ``vllm_blend`` in the arguments of ``vllm serve``; None: nothing does.

    Raises:
        ValueError: if they are wrong; says how.
    """
    found = parse(list(arguments)).additional_config
    return unframed(found) if isinstance(found, Mapping) and CONFIG_KEY in found else None


def check_engine(
    model: str | None, arguments: Sequence[str], settings: Mapping[str, Any]
) -> Iterator[Finding]:
    """An engine that ``vllm serve MODEL ARGUMENTS`` would start.

    Args:
        model: None: it is named in the arguments.
        settings: of blending; what the arguments have of them is left out.
    """
    config = None
    try:
        config = engine_config([*(["--model", model] if model else []), *arguments], settings)
    except Exception as error:
        yield wrong("engine", first_line(error), "Mend the model, or the arguments after --.")
    if config is None:
        return
    name = config.model_config.architecture
    if reason := why_unsupported(config):
        do = "Leave these options out, or serve without vllm_blend."
        yield wrong("engine", f"{name}: {reason.partition(';')[0]}", do)
    else:
        yield ok("engine", f"{name}, {config.model_config.dtype}: nothing that blending refuses")
    yield from _check_backend(config)
    yield from _check_settings(config)
    yield from _check_verdicts(config)


def _check_backend(config: Any) -> Iterator[Finding]:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model, cache = config.model_config, config.cache_config
    do = f"--attention-backend with one of {', '.join(BACKENDS)}, as the device allows."
    try:
        with set_current_vllm_config(config):
            found = get_attn_backend(
                model.get_head_size(), model.dtype, cache.cache_dtype, use_mla=model.use_mla
            )
    except Exception as error:
        yield wrong("backend", first_line(error), do)
        return
    if found.get_name() in BACKENDS:
        yield ok("backend", f"{found.get_name()} (vLLM may choose another one for some layers)")
    else:
        yield wrong("backend", f"vLLM would choose {found.get_name()}, which cannot blend", do)


def _check_settings(config: Any) -> Iterator[Finding]:
    try:
        settings = ServerSettings.of(config)
    except ValueError:
        return  # said of the settings by themselves
    assert settings is not None  # engine_config has seen to it
    model = config.model_config
    try:
        settings.blend.check_architecture([model.architecture])
    except ValueError as error:
        yield wrong("policy", str(error), 'Set "policy" to one of those; the default is one.')
    try:
        settings.blend.check_num_layers(model.hf_text_config.num_hidden_layers)
    except ValueError as error:
        yield wrong("policy", str(error), 'Leave "check_layers" out: [1] is the default.')
    yield from _check_memory(config, settings)
    scheduler, longest = config.scheduler_config, model.max_model_len
    step = scheduler.max_num_batched_tokens
    if settings.step_rows is not None and settings.step_rows >= step:
        yield note(
            "steps",
            f"step_rows is {settings.step_rows}, and a step holds {step} tokens, so it changes nothing",
            "--max-num-batched-tokens of several times step_rows: more blended prompts share a step.",
        )
    if scheduler.enable_chunked_prefill and step < longest:
        yield note(
            "steps",
            f"a step holds {step} tokens, a prompt up to {longest}: longer ones are blended in "
            "windows, and only one of them holds the question",
            "--max-num-batched-tokens of your longest prompt, or --max-model-len as short as that.",
        )


def _check_memory(config: Any, settings: ServerSettings) -> Iterator[Finding]:
    storage = (settings.store or {}).get("storage", "auto")
    room = settings.chunk_bytes // bytes_per_token(config, storage)
    memory = "ram_gb" if settings.store is None else "host_gb of store"
    needed = min(config.model_config.max_model_len, settings.max_chunk_tokens)
    if room < needed:
        what = f"{memory} holds {room} tokens of this model's KV; one chunk may have {needed}"
        yield wrong("memory", what, f"Raise {memory}.")
    elif settings.store is None and settings.chunk_bytes > CROWDED * host_memory():
        what = f"ram_gb is {settings.ram_gb:g}, and this machine has {host_memory() / 1e9:.0f} GB"
        yield wrong("memory", what, "Lower ram_gb; a store's disk holds what does not fit.")
    else:
        yield ok("memory", f"{memory} holds {room} tokens of this model's KV")


def _check_verdicts(config: Any) -> Iterator[Finding]:
    from vllm_blend.model.verdicts import kept_verdicts

    verdicts = kept_verdicts(config.model_config)
    dtype = str(config.model_config.dtype)
    if not verdicts:
        yield note("probe", "no engine has probed this model here yet; the first start does")
    for about, verdict in {tuple(sorted(a.items())): (a, v) for a, v in reversed(verdicts)}.values():
        where = f"{about['dtype']}, {about['backends']}, tensor parallel {about['ranks']}"
        if not verdict.refused:
            yield ok("probe", f"{where}: {verdict}")
        elif about["dtype"] == dtype:
            yield wrong("probe", f"{where}: {verdict.refused}", "Serve this model without vllm_blend.")
        else:
            yield note("probe", f"{where}: {verdict.refused}")
