"""``vllm-blend serve``: vLLM's OpenAI server with blending, as this machine's vLLM is started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_blend.cli import vllm_command
from vllm_blend.cli.engine_args import first_line, parse
from vllm_blend.cli.options import Arguments, Model, Settings
from vllm_blend.cli.output import console, help_text, quiet_vllm, wrong_call
from vllm_blend.cli.settings import settings_or_wrong_call
from vllm_blend.server.config import CONFIG_KEY, ServerSettings

CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"
CPU_CACHE_GIB, CPU_CACHE_SHARE = 4, 0.25
"""Of vLLM's own KV cache on a CPU, at most; by its default it takes nearly all memory."""
CACHE_OPTIONS = ("gpu_memory_utilization", "kv_cache_memory_bytes")

HELP = help_text(
    """Start vLLM's OpenAI server with blending: "vllm serve MODEL --additional-config ...", also where
    vLLM is vllm-cpu, whose "vllm serve" does not start.

    Settings go to blending, all other options to vLLM, with -- before them or without. On a CPU vLLM's
    own KV cache gets 4 GiB or a quarter of the free memory, unless $VLLM_CPU_KVCACHE_SPACE or an
    argument says otherwise.""",
    "vllm-blend serve MODEL",
    "vllm-blend serve MODEL --settings blend.yaml --port 8001 --max-model-len 8192",
    "vllm-blend serve MODEL --settings '{\"page\": true}'",
)


def serve(model: Model, arguments: Arguments = None, settings: Settings = None) -> None:
    if model.startswith("-"):
        raise wrong_call(f"the model comes before vLLM's options, of which {model} may be one")
    values = settings_or_wrong_call(settings)
    given = dict(os.environ)  # the server's; only this process is quiet
    quiet_vllm()
    try:
        ServerSettings.from_mapping(values)
        command, environment = server_command(model, arguments or [], values, given)
    except ValueError as error:
        raise wrong_call(first_line(error)) from None
    if CPU_CACHE in environment and CPU_CACHE not in given:
        said = f"{CPU_CACHE}={environment[CPU_CACHE]} (GiB, vLLM's own KV cache)"
        console(stderr=True).print(said, markup=False)
    os.execvpe(command[0], command, environment)


def server_command(
    model: str,
    arguments: Sequence[str],
    settings: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
) -> tuple[list[str], dict[str, str]]:
    """What starts the server: its command, and its environment.

    Args:
        settings: of blending; they go before those that the arguments have.
        environment: to start from.

    Raises:
        ValueError: for arguments that vLLM does not know.
    """
    options = parse(arguments)
    config = dict(options.additional_config or {})
    config[CONFIG_KEY] = config.get(CONFIG_KEY, {}) | dict(settings)
    command = [sys.executable, "-m", vllm_command.__name__, "serve", model, *arguments]
    command += ["--additional-config", json.dumps(config)]
    given = {k: v for k, v in environment.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    default = parse([])
    if all(getattr(options, name) == getattr(default, name) for name in CACHE_OPTIONS) and _on_cpu():
        given.setdefault(CPU_CACHE, str(_cpu_cache_gib()))
    return command, given


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _cpu_cache_gib() -> int:
    """1 at least; vLLM takes whole ones."""
    import psutil

    free = psutil.virtual_memory().available / 2**30
    return max(1, min(CPU_CACHE_GIB, int(CPU_CACHE_SHARE * free)))
