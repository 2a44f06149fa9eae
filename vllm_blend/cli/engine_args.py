"""The arguments of ``vllm serve``, as vLLM itself reads them; no engine is started."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from vllm_blend.server.config import CONFIG_KEY


def engine_config(arguments: Sequence[str], settings: Mapping[str, Any]) -> Any:
    """vLLM's configuration; raises whatever vLLM refuses the arguments with.

    Args:
        settings: of blending; what the arguments have of them is left out.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    options = parse(arguments)
    found = options.additional_config if isinstance(options.additional_config, Mapping) else {}
    options.additional_config = dict(found) | {CONFIG_KEY: dict(settings)}
    # of which vLLM's defaults depend, the tokens of a step among them
    return AsyncEngineArgs.from_cli_args(options).create_engine_config(UsageContext.OPENAI_API_SERVER)


def engine_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Those that are not vLLM's defaults, for ``vllm.LLM``; raises ValueError where they are wrong."""
    from vllm.engine.arg_utils import EngineArgs

    given, default = parse(arguments), parse([])
    names = [field.name for field in fields(EngineArgs) if hasattr(given, field.name)]
    values = {name: getattr(given, name) for name in names}
    changed = {name: value for name, value in values.items() if value != getattr(default, name)}
    return {name: value for name, value in changed.items() if name != "additional_config"}


def parse(arguments: Sequence[str]) -> Any:
    """The options of ``vllm serve``; raises ValueError where they are wrong."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    except SystemExit:
        line = said.getvalue().strip().rpartition("\n")[2]
        raise ValueError(line.partition("error: ")[2] or line) from None


def first_line(error: Exception) -> str:
    """What an error says, without what pydantic adds to it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("Value error, ")]
    text = (told or lines or [type(error).__name__])[0]
    return text.removeprefix("Value error, ").partition(" [type=")[0]
