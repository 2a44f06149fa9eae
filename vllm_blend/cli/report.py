"""``vllm-blend report``: what a running server reused, what that saved, and what it keeps where."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from vllm_blend.cli.client import Server, ServerError
from vllm_blend.cli.options import Json
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
)
from vllm_blend.cli.server_metrics import OWN, STAGES, TTFT, ServerMetrics, reuse

KEY_ENV = "BLEND_KEY"
START = """vllm serve MODEL --additional-config '{"vllm_blend": {}}'"""

HELP = help_text(
    """Say what a running server reused since its start: requests, chunks and tokens, the tokens that it
    did not have to compute, how long stages took, what lies in which tier, and what each tenant has.

    It reads /metrics. Tenants are told to who has the operator's key (docs/serve.md), in an environment
    variable. Exit code 1: the server does not answer, or has counted no request that may blend.""",
    "vllm-blend report http://127.0.0.1:8000",
    "BLEND_KEY=0123456789abcdef vllm-blend report http://127.0.0.1:8000",
    "vllm-blend report http://127.0.0.1:8000 --json",
)


def report(
    url: Annotated[str, typer.Argument(help="A running server, e.g. http://127.0.0.1:8000.")],
    operator_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="The environment variable with the operator's key.")
    ] = KEY_ENV,
    as_json: Json = False,
) -> None:
    quiet_vllm()
    server = Server(url)
    try:
        metrics = ServerMetrics.read(server.get("/metrics").text)
        tenants = _tenants(server, os.environ.get(operator_key_env))
    except (ServerError, ValueError) as error:
        console(stderr=True).print(str(error), markup=False)
        raise found_wrong() from None
    finally:
        server.close()
    if not metrics.blends:
        said = f"{server.url} has counted no request that may blend; is it started to? {START}"
        console(stderr=True).print(said, markup=False)
        raise found_wrong()
    told = figures(metrics) | {"tenants": tenants}
    if as_json:
        print_json(told)
    else:
        _show(told, operator_key_env)


def figures(metrics: ServerMetrics) -> dict[str, Any]:
    """What is told of a server's counters."""
    bytes_of = metrics.by(f"{OWN}stored_bytes", "tier")
    stages = {stage: metrics.mean(f"{OWN}{stage}_seconds") for stage in STAGES}
    return reuse(metrics) | {
        "ttft_mean_s": metrics.mean(TTFT),
        "stages_mean_s": {stage: seconds for stage, seconds in stages.items() if seconds is not None},
        "tiers": {
            tier: {"chunks": int(count), "bytes": int(bytes_of.get(tier, 0))}
            for tier, count in metrics.by(f"{OWN}stored_chunks", "tier").items()
        },
        "store_hits": _counts(metrics.by(f"{OWN}store_hits", "tier")),
        "store_misses": _counts(metrics.by(f"{OWN}store_misses", "reason")),
        "loaded_chunks": int(metrics.total(f"{OWN}loaded_chunks_total")),
        "slow_chunks": _counts(metrics.by(f"{OWN}slow_chunks_total", "tier")),
        "lost_chunks": _counts(metrics.by(f"{OWN}lost_chunks_total", "reason")),
        "background": {
            name: int(metrics.total(f"{OWN}{name}_chunks"))
            for name in ("computed", "waiting", "dropped", "evicted")
        },
    }


def _counts(values: Mapping[str, float]) -> dict[str, int]:
    return {name: int(value) for name, value in values.items()}


def _tenants(server: Server, key: str | None) -> dict[str, dict[str, int]] | None:
    """Chunks and tokens in memory by tenant, over all engines; None: no key was given."""
    if key is None:
        return None
    found: dict[str, dict[str, int]] = {}
    for engine in server.get("/blend/stats", key=key).json()["engines"]:
        for tenant, counts in engine["tenants"].items():
            sums = found.setdefault(tenant, dict.fromkeys(counts, 0))
            for name, count in counts.items():
                sums[name] += count
    return found


def _show(told: Mapping[str, Any], operator_key_env: str) -> None:
    requests, chunks = told["requests"], told["chunks"]
    there = chunks["hit"] + chunks["cached"]
    computed, tokens = told["computed_tokens"], told["prompt_tokens"]
    lines = [
        ("requests", f"{requests['blended']} blended, {requests['cached']} in vLLM's prefix cache, "
                     f"{requests['full_prefill']} computed in full"),
        ("chunks found", f"{share(told['hit_rate'])}: {there} of {sum(chunks.values())}, "
                         f"{told['loaded_chunks']} of them loaded from lower tiers"),
        ("tokens reused", share(told["reused_share"])),
        ("in vLLM's prefix cache", share(told["prefix_cached_share"])),
        ("reused and recomputed", share(told["recomputed_share"])),
        ("tokens computed", f"{computed} of {tokens}" + (
            f", {tokens / computed:.1f} times fewer" if computed else "")),
    ]  # fmt: skip
    if told["ttft_mean_s"] is not None:
        lines.append(("TTFT, mean", f"{told['ttft_mean_s']:.3f} s, of all requests of the server"))
    stages = ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in told["stages_mean_s"].items())
    lines += [("stages, means", stages)] if stages else []
    names = {"slow_chunks": "slower to load", "lost_chunks": "lost", "store_misses": "store misses"}
    lines += [(said, _listed(told[name])) for name, said in names.items() if told[name]]
    background = told["background"]
    lines.append(("in the background", _listed({f"{name}": n for name, n in background.items()})))
    print_table(("", ""), lines)
    hits = told["store_hits"]
    rows = [
        [tier, str(kept["chunks"]), size(kept["bytes"]), str(hits.get(tier, 0))]
        for tier, kept in told["tiers"].items()
    ]
    say("")
    print_table(("tier", "chunks", "holds", "store hits"), rows, numbers=(1, 2, 3))
    say("")
    if told["tenants"] is None:
        say(f"Tenants: give the operator's key in ${operator_key_env}.")
        return
    held = [
        [tenant or "(none)", *(str(counts[name]) for name in ("chunks", "tokens", "in_use"))]
        for tenant, counts in sorted(told["tenants"].items(), key=lambda one: -one[1]["tokens"])
    ]
    print_table(("tenant", "chunks", "tokens", "in use"), held, numbers=(1, 2, 3))


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
