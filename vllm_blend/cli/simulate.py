"""``vllm-blend simulate``: what a server would reuse of a trace, before there is one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_blend.cli.engine_args import Arguments, engine_config, first_line
from vllm_blend.cli.output import (
    Json,
    help_text,
    print_json,
    print_table,
    quiet_vllm,
    say,
    share,
    size,
    wrong_call,
)
from vllm_blend.cli.prompts import read_rows
from vllm_blend.cli.settings import Settings, settings_or_wrong_call
from vllm_blend.store.compute_time import ComputeTime, EngineTimes
from vllm_blend.store.load_time import LoadTime

if TYPE_CHECKING:
    from vllm_blend.cli.prompts import Row
    from vllm_blend.cli.simulation import Served, Simulation

HELP = help_text(
    """Say what a server would reuse of a trace: hit rate, reused share, memory by tier, and the gain in
    time to first token. The model is not loaded; its tokenizer and config.json are enough.

    TRACE has a prompt a line (docs/cli.md). vLLM's own scheduler runs, as a blending server has it,
    over a stand-in for the model. A prompt comes when its line says ("at": seconds), else once the
    server is idle. For times a fit of prefills is needed: --times has one, --measure makes one on this
    machine.""",
    "vllm-blend simulate trace.jsonl MODEL",
    "vllm-blend simulate trace.jsonl MODEL --settings blend.yaml --times times.json --measure",
    "vllm-blend simulate trace.jsonl MODEL --cache-gb 40 --json -- --max-model-len 16384",
)


def simulate(
    trace: Annotated[Path, typer.Argument(help="Prompts, as lines of JSON (.jsonl, .jsonl.gz).")],
    model: Annotated[str, typer.Argument(help="Folder with config.json and a tokenizer.")],
    arguments: Arguments = None,
    settings: Settings = None,
    times: Annotated[
        Path | None, typer.Option(help="A fit of prefill times (JSON), of --measure's making.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the model here, time it, and write --times.")
    ] = False,
    cache_gb: Annotated[float, typer.Option(min=0.001, help="GB of vLLM's own KV cache.")] = 8.0,
    load_gbps: Annotated[float, typer.Option(min=0.001, help="GB/s of loads from lower tiers.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of the trace.")] = None,
    as_json: Json = False,
) -> None:
    quiet_vllm()
    values = settings_or_wrong_call(settings)
    if values.get("recomp_ratio") == "auto":
        raise wrong_call("simulate takes a fixed recomp_ratio, not 'auto'", "--settings")
    try:
        rows = read_rows(trace, limit)
    except ValueError as error:
        raise wrong_call(str(error), "TRACE") from None
    if measure and times is None:
        raise wrong_call("--measure writes a file: name it by --times", "--measure")
    fit = None
    if times is not None:
        fit = measured(model, times) if measure else read_times(times)
    from vllm.exceptions import VLLMValidationError

    from vllm_blend.cli.simulation import Simulation

    loads = {name: LoadTime(1e-4, load_gbps * 1e9) for name in ("disk", "redis", "s3")}
    runs: list[tuple[Simulation, list[Served]]] = []
    try:
        for field in (None, "off") if fit is not None else (None,):
            config = engine_config(["--model", model, *(arguments or [])], values)
            server = Simulation(config, cache_gb, fit, loads)
            runs.append((server, server.serve(rows, field)))
    except (VLLMValidationError, ValueError, OSError) as error:
        raise wrong_call(first_line(error)) from None
    found = figures(rows, *runs[0]) | ({} if fit is None else gain(runs[0][1], runs[1][1]))
    if as_json:
        print_json(found)
    else:
        _show(found)


def figures(rows: Sequence[Row], server: Simulation, served: Sequence[Served]) -> dict[str, Any]:
    """What is told of a simulated trace; shares are of all chunks, or of all prompt tokens."""
    tokens = _sum(served, "prompt_tokens")
    kept, registry = server.stand_in.computed, server.scheduler.blend_chunks
    token_bytes = server.scheduler.blend_token_bytes
    memory = {
        "host": {
            "chunks": len(registry),
            "bytes": registry.num_tokens * token_bytes,
            "budget_bytes": server.settings.chunk_bytes,
            "evicted_chunks": registry.num_evicted,
        }
    }
    for tier in server.stand_in.tiers:
        memory[tier.name] = {
            "chunks": len(tier.index),
            "bytes": tier.index.num_bytes,
            "budget_bytes": tier.budget_bytes,
        }
    return {
        "prompts": len(rows),
        "prompt_tokens": tokens,
        "chunks": chunks_of(served),
        "hit_rate": hit_rate(served),
        "hit_rate_second_half": hit_rate(served[len(served) // 2 :]),
        "reused_share": _sum(served, "reused_tokens") / max(tokens, 1),
        "prefix_cached_share": _sum(served, "cached_tokens") / max(tokens, 1),
        "recomputed_share": _sum(served, "recomputed_tokens") / max(tokens, 1),
        "all_chunks_bytes": sum(kept.values()) * token_bytes,
        "memory": memory,
    }


def gain(blended: Sequence[Served], full: Sequence[Served]) -> dict[str, Any]:
    """Times to first token, queueing included, with blending, and with vLLM's prefix cache alone."""
    one, other = [s.ttft for s in blended], [s.ttft for s in full]
    return {
        "ttft_s": {"median": median(one), "mean": mean(one)},
        "full_prefill_ttft_s": {"median": median(other), "mean": mean(other)},
        "ttft_gain": mean(other) / mean(one),
    }


def hit_rate(served: Sequence[Served]) -> float:
    """Share of the prompts' chunks whose KV was there: reused, or in vLLM's prefix cache."""
    there = _sum(served, "chunks") + _sum(served, "cached_chunks")
    return there / max(chunks_of(served), 1)


def chunks_of(served: Sequence[Served]) -> int:
    return sum(_sum(served, f"{name}chunks") for name in ("", "cached_", "missed_", "short_"))


def _sum(served: Sequence[Served], name: str) -> int:
    return sum(one.report.get(name, 0) for one in served)


def measured(model: str, path: Path) -> EngineTimes:
    """Times prefills of the model on this machine, and keeps the fit."""
    from vllm_blend.api.load_control import measure_engine
    from vllm_blend.cli.eval.run import make_blender

    times = measure_engine(make_blender(Path(model), 4096))
    path.write_text(json.dumps(asdict(times), indent=1) + "\n")
    return times


def read_times(path: Path) -> EngineTimes:
    """A fit of ``measured``'s, or one that was made by hand."""
    try:
        values = json.loads(path.read_text())
        return EngineTimes(ComputeTime(**values["blended"]), ComputeTime(**values["full"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "blended and full, each with fixed, token, row and pair, in seconds"
        raise wrong_call(f"{path} is no fit ({error}); expected {what}", "--times") from None


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
