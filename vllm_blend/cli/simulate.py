"""``vllm-blend simulate``: what a server would reuse of a trace, before there is one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_blend.cli.client import ServerError
from vllm_blend.cli.engine_args import engine_config, first_line
from vllm_blend.cli.options import Arguments, Json, Limit, Model, Prompts, Settings, rows_or_wrong_call
from vllm_blend.cli.output import (
    console,
    found_wrong,
    help_text,
    print_json,
    print_table,
    quiet_vllm,
    say,
    share,
    size,
    wrong_call,
)
from vllm_blend.cli.settings import settings_or_wrong_call
from vllm_blend.cli.simulated import figures, gain, over_replicas, served_by
from vllm_blend.cli.step_costs import StepCosts, measured
from vllm_blend.store.load_time import LoadTime

LOWER_TIERS = ("disk", "redis", "s3")

HELP = help_text(
    """Say what a server would reuse of a trace: hit rate, reused share, memory by tier, and the gain in
    time to first token. The model is not loaded; its tokenizer and config.json are enough.

    TRACE has a prompt a line (docs/cli.md). vLLM's own scheduler runs, as a blending server has it,
    over a stand-in for the model. A prompt comes when its line says ("at": seconds), else once the
    server is idle. For times a fit of steps is needed: --times has one; --measure makes one, with a
    server of the same arguments and settings on this machine, in a few minutes. --replicas 4 sends the
    prompts to four such servers too, in turn and as vllm_blend.api.routing does.""",
    "vllm-blend simulate trace.jsonl MODEL",
    "vllm-blend simulate trace.jsonl MODEL --settings blend.yaml --times times.json --measure",
    "vllm-blend simulate trace.jsonl MODEL --cache-gb 40 --json -- --max-model-len 16384",
)


def simulate(
    trace: Prompts,
    model: Model,
    arguments: Arguments = None,
    settings: Settings = None,
    times: Annotated[
        Path | None, typer.Option(help="A fit of steps' times (JSON), of --measure's making.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Start a server here, time it, and write --times.")
    ] = False,
    cache_gb: Annotated[float, typer.Option(min=0.001, help="GB of vLLM's own KV cache.")] = 8.0,
    load_gbps: Annotated[float, typer.Option(min=0.001, help="GB/s of loads from lower tiers.")] = 1.0,
    replicas: Annotated[
        list[int] | None,
        typer.Option(min=2, metavar="N", help="Also over N servers, routed in turn and by chunks."),
    ] = None,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    quiet_vllm()
    values = settings_or_wrong_call(settings)
    if values.get("recomp_ratio") == "auto":
        raise wrong_call("simulate takes a fixed recomp_ratio, not 'auto'", "--settings")
    rows = rows_or_wrong_call(trace, limit, "TRACE")
    if measure and times is None:
        raise wrong_call("--measure writes a file: name it by --times", "--measure")
    costs = None if times is None or measure else _read(times)
    from vllm.exceptions import VLLMValidationError

    given, loads = arguments or [], {name: LoadTime(1e-4, load_gbps * 1e9) for name in LOWER_TIERS}
    try:
        config = engine_config(["--model", model, *given], values)
        run = partial(served_by, config, cache_gb, loads)
        if measure and times is not None:
            longest = max(one.report["prompt_tokens"] for one in run(None, rows)[1])
            costs = measured(model, given, values, longest, config)
            costs.write(times)
        blended = run(costs, rows)
        found = figures(*blended)
        if costs is not None:
            found |= gain(blended[1], run(costs, rows, "off")[1])
        if replicas:
            held = max(1, *(tier["chunks"] for tier in found["memory"].values()))
            each = partial(over_replicas, partial(run, costs), rows)
            found["replicas"] = [
                one for count in replicas for one in each(count, held, costs is not None)
            ]
    except (VLLMValidationError, ValueError, OSError) as error:
        raise wrong_call(first_line(error)) from None
    except ServerError as error:
        console(stderr=True).print(str(error), markup=False)
        raise found_wrong() from None
    if as_json:
        print_json(found)
    else:
        _show(found)


def _read(path: Path) -> StepCosts:
    """A fit of ``--measure``'s, or one that was made by hand."""
    try:
        return StepCosts.read(path)
    except (OSError, ValueError) as error:
        raise wrong_call(f"{path} is no fit: {error}", "--times") from None


def _show(found: dict[str, Any]) -> None:
    lines = [
        ("prompts", f"{found['prompts']}, {found['prompt_tokens']} tokens in all"),
        ("chunks found", f"{share(found['hit_rate'])} of {found['chunks']}"),
        ("in the second half", share(found["hit_rate_second_half"])),
        ("tokens reused", share(found["reused_share"])),
        ("in vLLM's prefix cache", share(found["prefix_cached_share"])),
        ("reused and recomputed", share(found["recomputed_share"])),
        ("KV of all chunks", size(found["all_chunks_bytes"])),
    ]
    if "ttft_gain" in found:
        blended, full = found["ttft_s"], found["full_prefill_ttft_s"]
        lines += [
            ("TTFT, mean", f"{blended['mean']:.3f} s, {full['mean']:.3f} s by full prefill"),
            ("gain", f"{found['ttft_gain']:.2f}x"),
        ]
    print_table(("", ""), lines)
    say("")
    rows = [
        [name, str(tier["chunks"]), size(tier["bytes"]), size(tier["budget_bytes"])]
        for name, tier in found["memory"].items()
    ]
    print_table(("tier", "chunks", "holds", "of"), rows, numbers=(1, 2, 3))
    if evicted := found["memory"]["host"]["evicted_chunks"]:
        say(f"\n{evicted} chunks were dropped from host memory for others")
    if "replicas" in found:
        say("")
        _show_replicas(found["replicas"])


def _show_replicas(replicas: list[dict[str, Any]]) -> None:
    heads = ["servers", "routed", "chunks found", "tokens reused", "busiest has"]
    rows = [
        [
            str(one["servers"]),
            one["routed"],
            share(one["hit_rate"]),
            share(one["reused_share"]),
            f"{one['busiest']:.2f}x the mean",
        ]
        for one in replicas
    ]
    if all("ttft_s" in one for one in replicas):
        heads.append("TTFT, mean")
        rows = [
            [*row, f"{one['ttft_s']['mean']:.3f} s"] for row, one in zip(rows, replicas, strict=True)
        ]
    print_table(heads, rows, numbers=(0, 2, 3, 4, 5))
