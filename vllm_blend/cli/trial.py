"""``vllm-blend try``: both kinds of answers to the user's own prompts, and settings to serve with."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_blend.cli.engine_args import engine_options, first_line
from vllm_blend.cli.options import Arguments, Json, Limit, Model, Prompts, rows_or_wrong_call
from vllm_blend.cli.output import (
    found_wrong,
    help_text,
    print_json,
    print_table,
    quiet_vllm,
    say,
    wrong_call,
)
from vllm_blend.cli.prompts import Row
from vllm_blend.core.settings import policy_factors

if TYPE_CHECKING:
    from vllm_blend.cli.eval.runner import Runner
    from vllm_blend.cli.eval.runs import Result
    from vllm_blend.cli.eval.stats import Summary
    from vllm_blend.cli.eval.tasks import Task

POLICIES = "ahead*static,static"
RATIOS = "0.05,0.08,0.16,0.3,0.5"
WORTH = 1.2
"""From this gain in TTFT on blending is recommended."""

HELP = help_text(
    """Try blending on your own prompts: answers and time to first token beside full prefill's, how far
    the answers' tokens are from it (KL), and the smallest ratio that keeps the quality asked for.
    Writes settings to serve with.

    PROMPTS has chunks and a question, or a text with separators, a line of JSON each (docs/cli.md).
    Quality is the share of full reuse's KL to full prefill that blending removes: 0 is reuse of all KV
    as it is, 1 full prefill. Exit code 1: nothing reaches it, or it gains too little. The model is
    loaded in this process, and chunks are computed as a server keeps them: after other prompts'
    chunks.""",
    "vllm-blend try MODEL prompts.jsonl",
    "vllm-blend try MODEL prompts.jsonl --quality 0.5 --out blend.yaml",
    "vllm-blend serve MODEL --settings blend.yaml",
)


def attempt(
    model: Model,
    prompts: Prompts,
    arguments: Arguments = None,
    quality: Annotated[float, typer.Option(min=0, max=1, help="Share of the KL to remove.")] = 0.5,
    out: Annotated[Path, typer.Option(help="Settings to write: .yaml for --config, else JSON.")] = Path(
        "blend.yaml"
    ),
    policies: Annotated[str, typer.Option(help="Policies to try, by commas.")] = POLICIES,
    ratios: Annotated[str, typer.Option(help="Ratios to try, by commas.")] = RATIOS,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 32,
    max_model_len: Annotated[int, typer.Option(min=64, help="Tokens of the longest prompt.")] = 8192,
    limit: Limit = None,
    results: Annotated[
        Path | None, typer.Option(help="Keep results in this folder, and go on where they stop.")
    ] = None,
    as_json: Json = False,
) -> None:
    quiet_vllm()
    rows = _rows(prompts, limit)
    tried, shares = _names(policies), _ratios(ratios)
    folder = results or Path(tempfile.mkdtemp(prefix="vllm-blend-try-"))
    try:
        options = engine_options(arguments or [])
        runner, task = _runner(model, max_model_len, max_tokens, folder, options)
        best = _tuned(runner, task, rows, quality, tried, shares)
    except (ValueError, OSError, RuntimeError) as error:
        raise wrong_call(first_line(error)) from None
    shown = best or _nearest(runner)
    pairs = _pairs(runner.results, shown.method)
    good = best is not None and best.speedup is not None and best.speedup >= WORTH
    values = {} if best is None else _settings(best.method)
    if good:
        write_settings(out, values)
    told = {
        "prompts": [_told(*pair) for pair in pairs],
        "method": shown.method,
        "kl": shown.kl.value if shown.kl else None,
        "recovered": shown.recovered,
        "speedup": shown.speedup,
        "quality": quality,
        "recommended": good,
        "settings": values if good else None,
        "written_to": str(out) if good else None,
        "dtype": str(runner.blender.llm.model_config.dtype).removeprefix("torch."),
    }
    if as_json:
        print_json(told)
    else:
        _show(told, best, max(shares), model)
    if not good:
        raise found_wrong()


def write_settings(path: Path, values: Mapping[str, Any]) -> None:
    """A server's settings as ``vllm serve --config`` takes them, or as JSON for --additional-config."""
    framed = {"vllm_blend": dict(values)}
    if path.suffix in (".yaml", ".yml"):
        import yaml

        path.write_text(yaml.safe_dump({"additional-config": framed}, sort_keys=False))
    else:
        path.write_text(json.dumps(framed, indent=1) + "\n")


def _rows(path: Path, limit: int | None) -> list[Row]:
    rows = rows_or_wrong_call(path, limit, "PROMPTS")
    for number, row in enumerate(rows, 1):
        if not row.chunks:
            said = f"prompt {number} of {path} has no chunks, or no separator"
            raise wrong_call(said, "PROMPTS")
    return rows


def _names(policies: str) -> list[str]:
    names = [name.strip() for name in policies.split(",")]
    try:
        for name in names:
            policy_factors(name)
    except ValueError as error:
        raise wrong_call(str(error), "--policies") from None
    return names


def _ratios(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= ratio <= 1 for ratio in found):
        raise wrong_call(f"{text!r}: expected numbers from 0 to 1, by commas", "--ratios")
    return found


def _runner(
    model: str, max_model_len: int, max_tokens: int, folder: Path, options: Mapping[str, Any]
) -> tuple[Runner, Task]:
    """An engine with the model's chat template, if it has one; prompts one after the other."""
    from vllm_blend.cli.eval.run import make_blender
    from vllm_blend.cli.eval.runner import Runner
    from vllm_blend.cli.eval.runs import Protocol
    from vllm_blend.cli.eval.tasks import Task

    blender = make_blender(Path(model), max_model_len, chat=None, **options)
    task = Task("prompts", "", "{question}", "F1", max_tokens, stop=(), titled=False)
    protocol = Protocol(Path(model).name, chunk_tokens=max_model_len, max_tokens=max_tokens)
    return Runner(blender, protocol, folder), task


def _tuned(
    runner: Runner,
    task: Task,
    rows: Sequence[Row],
    quality: float,
    policies: Sequence[str],
    ratios: Sequence[float],
) -> Summary | None:
    from vllm_blend.cli.eval.data import Example, Passage
    from vllm_blend.cli.eval.runner import others
    from vllm_blend.cli.eval.tune import tune

    examples = [
        Example(str(number), tuple(map(Passage, row.chunks)), row.question, _answers(row))
        for number, row in enumerate(rows, 1)
    ]
    try:
        others(examples, examples)
        kind = ":behind=harvested"
    except ValueError:  # no prompt without a chunk of this one's
        kind = ":behind=text"
    return tune(runner, task, examples, quality, policies, ratios, kinds=[kind])


def _answers(row: Row) -> tuple[str, ...]:
    found = row.values.get("answers", "")
    return (found,) if isinstance(found, str) else tuple(map(str, found))


def _nearest(runner: Runner) -> Summary:
    """Of all that was tried, what is nearest to full prefill."""
    from vllm_blend.cli.eval.stats import summarize

    found = [s for s in summarize(runner.results) if s.kl is not None and "@" in s.method]
    return min(found, key=lambda summary: summary.kl.value if summary.kl else 0.0)


def _settings(method: str) -> dict[str, Any]:
    from vllm_blend.cli.eval.tune import settings_of

    return settings_of(method)


def _pairs(results: Sequence[Result], method: str) -> list[tuple[Result, Result]]:
    """Of each prompt what full prefill and the method gave."""
    full = {result.example: result for result in results if result.method == "full"}
    return [(full[result.example], result) for result in results if result.method == method]


def _told(full: Result, blended: Result) -> dict[str, Any]:
    return {
        "prompt": full.example,
        "tokens": full.num_tokens,
        "reused": blended.num_reused,
        "kl": blended.kl,
        "same": blended.same,
        "full": {key: asdict(full)[key] for key in ("answer", "ttft")},
        "blended": {key: asdict(blended)[key] for key in ("answer", "ttft")},
    }


def _show(told: Mapping[str, Any], best: Summary | None, largest: float, model: str) -> None:
    rows = [
        [
            one["prompt"],
            str(one["tokens"]),
            " ".join((one["full"]["answer"] or "").split()),
            f"{one['full']['ttft']:.2f}",
            "the same" if one["same"] else " ".join((one["blended"]["answer"] or "").split()),
            f"{one['blended']['ttft']:.2f}",
            f"{one['kl']:.3f}",
        ]
        for one in told["prompts"]
    ]
    heads = ("", "tokens", "full prefill", "TTFT s", "blended", "TTFT s", "KL")
    print_table(heads, rows, numbers=(1, 3, 5, 6))
    same = sum(bool(one["same"]) for one in told["prompts"])
    say(
        f"\n{told['method']}: {same} of {len(rows)} answers are the same; KL {told['kl']:.3f}, "
        f"{told['recovered'] or 0:.0%} less than full reuse's; TTFT {told['speedup'] or 0:.1f} times "
        "sooner (medians)"
    )
    if best is None:
        say(f"Not recommended: no policy removes {told['quality']:.0%} at ratios up to {largest:g}.")
    elif not told["recommended"]:
        say(f"Not recommended: TTFT gains less than {WORTH} times. Are the prompts long enough?")
    else:
        say(f"Recommended. Written to {told['written_to']}:")
        settings = shlex.quote(told["written_to"])
        say(f"  vllm-blend serve {shlex.quote(model)} --settings {settings} --dtype {told['dtype']}")
