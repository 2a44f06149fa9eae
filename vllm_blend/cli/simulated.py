"""What is told of a simulated trace: of one server, and of several behind a gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from vllm_blend.api.routing import Router
from vllm_blend.cli.prompts import Row
from vllm_blend.cli.step_costs import StepCosts
from vllm_blend.store.load_time import LoadTime

if TYPE_CHECKING:
    from vllm_blend.cli.simulation import Served, Simulation

Run = Callable[[Sequence[Row]], "tuple[Simulation, list[Served]]"]
"""A server of its own that is asked some rows."""


def served_by(
    config: Any,
    cache_gb: float,
    loads: Mapping[str, LoadTime],
    costs: StepCosts | None,
    rows: Sequence[Row],
    field: Any = None,
) -> tuple[Simulation, list[Served]]:
    """A server that was asked all of a trace; ``field``: of blending, instead of the rows' own."""
    from vllm_blend.cli.simulation import Simulation

    server = Simulation(config, cache_gb, costs, loads)
    return server, server.serve(rows, field)


def figures(server: Simulation, served: Sequence[Served]) -> dict[str, Any]:
    """Of one server; shares are of all chunks, or of all prompt tokens."""
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
        "prompts": len(served),
        "prompt_tokens": _sum(served, "prompt_tokens"),
        "chunks": _num_chunks(served),
        **_shares(served),
        "hit_rate_second_half": _hit_rate(served[len(served) // 2 :]),
        "all_chunks_bytes": sum(kept.values()) * token_bytes,
        "memory": memory,
    }


def gain(blended: Sequence[Served], full: Sequence[Served]) -> dict[str, Any]:
    """Times to first token, queueing included, with blending, and with vLLM's prefix cache alone."""
    one, other = _ttft(blended), _ttft(full)
    return {
        "ttft_s": one,
        "full_prefill_ttft_s": other,
        "ttft_gain": other["mean"] / one["mean"],
    }


def over_replicas(
    run: Run, rows: Sequence[Row], count: int, held: int, timed: bool
) -> list[dict[str, Any]]:
    """``count`` servers that share nothing, with prompts in turn, and as ``Router`` sends them.

    Args:
        held: about how many chunks a server holds.
        timed: steps take time.

    Returns:
        Of each route shares, and ``busiest``: the most prompts of a server, as a multiple of the mean.
    """
    router = Router(map(str, range(count)), held)
    routes = {
        "in turn": [number % count for number in range(len(rows))],
        "by chunks": [int(router.choose(row.request("simulated", chat=True)[1])) for row in rows],
    }
    found = []
    for name, chosen in routes.items():
        parts = [[row for row, at in zip(rows, chosen, strict=True) if at == k] for k in range(count)]
        served = [one for part in parts for one in run(part)[1]]
        busiest = max(map(len, parts)) * count / len(rows)
        times = {"ttft_s": _ttft(served)} if timed else {}
        found.append({"servers": count, "routed": name, **_shares(served), "busiest": busiest, **times})
    return found


def _shares(served: Sequence[Served]) -> dict[str, float]:
    tokens = max(_sum(served, "prompt_tokens"), 1)
    return {
        "hit_rate": _hit_rate(served),
        "reused_share": _sum(served, "reused_tokens") / tokens,
        "prefix_cached_share": _sum(served, "cached_tokens") / tokens,
        "recomputed_share": _sum(served, "recomputed_tokens") / tokens,
    }


def _hit_rate(served: Sequence[Served]) -> float:
    """Share of the prompts' chunks whose KV was there: reused, or in vLLM's prefix cache."""
    there = _sum(served, "chunks") + _sum(served, "cached_chunks")
    return there / max(_num_chunks(served), 1)


def _num_chunks(served: Sequence[Served]) -> int:
    return sum(_sum(served, f"{name}chunks") for name in ("", "cached_", "missed_", "short_"))


def _sum(served: Sequence[Served], name: str) -> int:
    return sum(one.report.get(name, 0) for one in served)


def _ttft(served: Sequence[Served]) -> dict[str, float]:
    times = [one.ttft for one in served]
    return {"median": median(times), "mean": mean(times)}
