"""A running server, by its address: its health, its metrics, and a request that blends."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from vllm_blend.cli.checks.finding import Finding, note, ok, wrong
from vllm_blend.cli.client import Server, ServerError, report_of
from vllm_blend.compat.fit import is_known
from vllm_blend.compat.members import VERSIONS

SERIES = "vllm:blend_"
START = """vllm serve MODEL --additional-config '{"vllm_blend": {}}'"""
TRIES, PAUSE_S = 20, 0.5
"""How often a request is sent until its chunks are reused."""

WORDS = ("river", "stone", "lamp", "paper", "winter", "garden", "copper", "letter", "harbour", "field")
"""Of the texts that are asked about: 70 of them are more than a chunk has at least."""


def check_server(url: str) -> Iterator[Finding]:
    """All of this file's checks."""
    server = Server(url)
    try:
        start = time.perf_counter()
        server.get("/health")
        yield ok("server", f"{server.url} is healthy ({1e3 * (time.perf_counter() - start):.0f} ms)")
        yield from _check_version(server)
        yield from _check_blending(server)
        yield from _check_metrics(server)
    except ServerError as error:
        yield wrong("server", str(error), f"Start it ({START}), or mend --url.")
    finally:
        server.close()


def _check_version(server: Server) -> Iterator[Finding]:
    try:
        version = str(server.get("/version").json()["version"])
    except (ServerError, KeyError, ValueError):
        return  # a gateway may hide it
    if not is_known(version):
        yield wrong(
            "server",
            f"it runs vLLM {version}",
            f"Start it with vLLM {' or '.join(VERSIONS)}, where vllm-blend is installed.",
        )


def _check_blending(server: Server) -> Iterator[Finding]:
    """Sends a made-up prompt until its chunks are reused, in an order that no prefix cache knows."""
    model, tenant = server.model(), f"doctor-{secrets.token_hex(8)}"
    texts = [" ".join(secrets.choice(WORDS) for _ in range(70)) for _ in range(3)]
    report: dict[str, Any] = {}
    start = time.perf_counter()
    try:
        for number in range(TRIES):
            order = texts[number % 3 :] + texts[: number % 3]
            report = report_of(_ask(server, model, order, tenant, number))
            if not report or report.get("reused_tokens"):
                break
            time.sleep(PAUSE_S if number else 0)
    except ServerError as error:
        yield from _refusal(str(error))
        return
    seconds = time.perf_counter() - start
    if not report:
        yield wrong(
            "blending",
            "an answer has no report: vLLM took the blend field for nothing of its own",
            "Install vllm-blend where the server runs, and look for vllm_blend in its log.",
        )
    elif report.get("reused_tokens"):
        yield ok(
            "blending",
            f"{report['reused_tokens']} of {report['prompt_tokens']} prompt tokens reused, "
            f"{report['recomputed_tokens']} of them recomputed, {seconds:.1f} s after they were new",
        )
    else:
        why = report.get("why_not") or "no reason is told"
        yield wrong(
            "blending",
            f"chunks were not reused in {seconds:.0f} s: {why}",
            "The server's log has the cause (vllm_blend); docs/serve.md says when a chunk is reused.",
        )


def _ask(server: Server, model: str, texts: list[str], tenant: str, number: int) -> Any:
    """A completion over the texts; of one token, as it is only the prompt that counts."""
    mark = f"<|{secrets.token_hex(4)}|>"
    body = {
        "model": model,
        "prompt": mark.join([f"Texts {number}.\n", *texts, "\nWhich word comes first?"]),
        "max_tokens": 1,
        "temperature": 0,
        "cache_salt": tenant,
        "vllm_xargs": {"blend": json.dumps({"separator": mark, "report": True})},
    }
    return server.post("/v1/completions", body)


def _refusal(message: str) -> Iterator[Finding]:
    if "was not started to blend" in message:
        yield wrong("blending", "the server was not started to blend requests", f"{START}.")
    elif "client_fields do not list" in message:
        yield note(
            "blending",
            f"it could not be tried: {message}",
            "List separator and report in client_fields, or ask by what the operator lists.",
        )
    else:
        yield wrong(
            "blending",
            f"a blended request is refused: {message}",
            "Install vllm-blend where the server runs, and start it by " + START,
        )


def _check_metrics(server: Server) -> Iterator[Finding]:
    try:
        text = server.get("/metrics").text
    except ServerError as error:
        yield note("metrics", f"/metrics: {error}", "Let your monitoring reach it.")
        return
    counts = {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in text.splitlines())
        if name.startswith(SERIES)
    }
    if not counts:
        yield wrong(
            "metrics",
            f"/metrics has no series {SERIES}*: no request that may blend was counted",
            f"{START}; of a server that has just started, ask again.",
        )
        return
    requests = {k: n for k, n in counts.items() if k.startswith(f"{SERIES}requests_total")}
    results = {
        result: sum(number for name, number in requests.items() if f'result="{result}"' in name)
        for result in ("blended", "cached", "full_prefill")
    }
    lost = sum(n for name, n in counts.items() if name.startswith(f"{SERIES}lost_chunks_total"))
    told = ", ".join(f"{number:.0f} {name}" for name, number in results.items())
    yield ok("metrics", f"requests since the start: {told}")
    if lost:
        yield note(
            "metrics",
            f"{lost:.0f} chunks that were known were not in memory",
            "The server's log says why; they are computed again.",
        )
