"""``vllm-blend simulate``: what a server would reuse of a trace, before there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated, Any

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
from vllm_blend.cli.step_costs import StepCosts, measured
from vllm_blend.store.load_time import LoadTime

if TYPE_CHECKING:
    from vllm_blend.cli.prompts import Row
    from vllm_blend.cli.simulation import Served, Simulation

LOWER_TIERS = ("disk", "redis", "s3")

HELP = help_text(
    """Say what a server would reuse of a trace: hit rate, reused share, memory by tier, and the gain in
    time to first token. The model is not loaded; its tokenizer and config.json are enough.

    TRACE has a prompt a line (docs/cli.md). vLLM's own scheduler runs, as a blending server has it,
    over a stand-in for the model. A prompt comes when its line says ("at": seconds), else once the
    server is idle. For times a fit of steps is needed: --times has one; --measure makes one, with a
    server of the same arguments and settings on this machine, in a few minutes.""",
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
        run = partial(served_by, config, rows, cache_gb, loads)
        if measure and times is not None:
            longest = max(one.report["prompt_tokens"] for one in run(None, None)[1])
            costs = measured(model, given, values, longest, config)
            costs.write(times)
        blended = run(costs, None)
        found = figures(rows, *blended)
        if costs is not None:
            found |= gain(blended[1], run(costs, "off")[1])
    except (VLLMValidationError, ValueError, OSError) as error:
        raise wrong_call(first_line(error)) from None
    except ServerError as error:
        console(stderr=True).print(str(error), markup=False)
        raise found_wrong() from None
    if as_json:
        print_json(found)
    else:
        _show(found)


def served_by(
    config: Any,
    rows: Sequence[Row],
    cache_gb: float,
    loads: Mapping[str, LoadTime],
    costs: StepCosts | None,
    field: Any,
) -> tuple[Simulation, list[Served]]:
    """A server that was asked all of a trace; ``field``: of blending, instead of the rows' own."""
    from vllm_blend.cli.simulation import Simulation

    server = Simulation(config, cache_gb, costs, loads)
    return server, server.serve(rows, field)


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
