"""``vllm-blend bench serve``: vLLM's own client sends a server a trace, blended and not."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import typer

from vllm_blend.cli.client import Server, ServerError
from vllm_blend.cli.engine_args import first_line
from vllm_blend.cli.options import (
    Arguments,
    Json,
    Limit,
    Prompts,
    Settings,
    Url,
    folder_or_name,
    rows_or_wrong_call,
)
from vllm_blend.cli.output import (
    console,
    found_wrong,
    help_text,
    print_json,
    print_table,
    quiet_vllm,
    say,
    share,
    working,
    wrong_call,
)
from vllm_blend.cli.prompts import Row
from vllm_blend.cli.server_metrics import ServerMetrics, reuse
from vllm_blend.cli.server_process import server_process
from vllm_blend.cli.settings import settings_or_wrong_call

WAYS = {"full prefill": "off", "blended": None}
"""What ``Row.request`` takes as the requests' blend field."""

SEED = 0
"""Of the times between requests that vLLM's client draws: both ways have the same."""

HELP = help_text("Measure a server under load.", "vllm-blend bench serve --help")

HELP_SERVE = help_text(
    """Send a trace to a server twice, by full prefill and blended, and compare times to first token.

    TRACE has a prompt a line (docs/cli.md). vLLM's own benchmark client sends them: when their lines
    say ("at": seconds), at --rate, or --concurrency at a time (1). The server is one that runs (--url),
    or one that is started here (--model). Each run has tenants of its own, so that neither finds what
    another left; with --warm the chunks are known before the blended one begins.""",
    "vllm-blend bench serve trace.jsonl --url http://127.0.0.1:8000 --warm",
    "vllm-blend bench serve trace.jsonl --model MODEL --rate 2 -- --dtype bfloat16",
    "vllm-blend bench serve trace.jsonl --url http://127.0.0.1:8000 --rate 2 --sent sent.jsonl",
)

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@dataclass(frozen=True)
class Load:
    """When requests are sent.

    Attributes:
        timed: when their lines say.
        rate: requests a second, as a Poisson process; infinite: at once.
        at_once: so many at most.
        output_tokens: of each answer.
    """

    timed: bool
    rate: float
    at_once: int | None
    output_tokens: int


@app.command("serve", help=HELP_SERVE)
def serve(
    trace: Prompts,
    arguments: Arguments = None,
    url: Url = None,
    model: Annotated[
        str | None, typer.Option(help="Start a server of this model here.", callback=folder_or_name)
    ] = None,
    settings: Settings = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests a second (Poisson).")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time; without --rate 1.")
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 16,
    warm: Annotated[
        bool, typer.Option("--warm", help="Let the server know all chunks before.")
    ] = False,
    sent: Annotated[
        Path | None, typer.Option(help="Write the trace there, with the times at which it was sent.")
    ] = None,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    quiet_vllm()
    if (url is None) == (model is None):
        raise wrong_call("give --url, or --model")
    rows = rows_or_wrong_call(trace, limit, "TRACE")
    timed = rate is None and concurrency is None and rows[0].at is not None
    at_once = concurrency or (None if timed or rate else 1)
    load = Load(timed, rate or float("inf"), at_once, output_tokens)
    try:
        with contextlib.ExitStack() as stack:
            if model is not None:
                values = settings_or_wrong_call(settings)
                server = stack.enter_context(server_process(model, arguments or [], values))
            else:
                server = stack.enter_context(contextlib.closing(Server(str(url), timeout_s=600.0)))
            results = measure(server, rows, load, warm)
    except ServerError as error:
        console(stderr=True).print(str(error), markup=False)
        raise found_wrong() from None
    except ValueError as error:
        raise wrong_call(first_line(error)) from None
    if sent is not None:
        write_sent(sent, rows, results["blended"]["sent_at_s"])
    gain = results["full prefill"]["ttft_s"]["mean"] / results["blended"]["ttft_s"]["mean"]
    if as_json:
        print_json({"prompts": len(rows), "ttft_gain": gain, "ways": results})
    else:
        _show(results, gain)
    if failed := sum(result["failed"] for result in results.values()):
        said = next(result["error"] for result in results.values() if result["failed"])
        console(stderr=True).print(f"{failed} requests failed, the first one so: {said}", markup=False)
        raise found_wrong()


def measure(server: Server, rows: Sequence[Row], load: Load, warm: bool) -> dict[str, Any]:
    """Both ways, one after the other.

    Raises:
        ServerError: of the server's.
        ValueError: for rows that cannot be sent.
    """
    model, chat = server.model(), has_chat_template(server)
    found = {}
    for way, field in WAYS.items():
        salt = f"bench-{secrets.token_hex(6)}-"
        if warm and field is None:
            with working("letting the server know the chunks"):
                make_known(server, rows, salt)
        requests = [row.request(model, chat, field) for row in rows]
        before = ServerMetrics.read(server.get("/metrics").text)
        with working(f"{way}: {len(rows)} prompts"):
            result = run_client(server, model, requests, [row.at for row in rows], salt, load)
        counted = ServerMetrics.read(server.get("/metrics").text).since(before)
        found[way] = told_of(result) | ({} if field == "off" else {"reuse": reuse(counted)})
    return found


def run_client(
    server: Server,
    model: str,
    requests: Sequence[tuple[str, dict[str, Any]]],
    times: Sequence[float | None],
    salt: str,
    load: Load,
) -> dict[str, Any]:
    """vLLM's benchmark client on the requests; its result.

    Args:
        requests: paths and bodies; all of one path.
        times: when to send each, in seconds, where the load is timed.
        salt: before each request's own ``cache_salt``.
    """
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS
    from vllm.benchmarks.serve import TaskType, benchmark

    paths = {path for path, _ in requests}
    if len(paths) > 1:
        raise ValueError("the trace has both chats and texts: vLLM's client sends one kind at a time")
    path = paths.pop()
    kind = "openai-chat" if path.endswith("chat/completions") else "openai"
    assert kind in ASYNC_REQUEST_FUNCS
    samples = [
        SampleRequest(
            prompt=body.get("prompt", ""),
            prompt_len=0,  # the server's usage tells
            expected_output_len=load.output_tokens,
            timestamp=at,
            chat_messages=body.get("messages"),
            request_overrides={
                "vllm_xargs": body["vllm_xargs"],
                "cache_salt": salt + body.get("cache_salt", ""),
                "temperature": 0,
            },
        )
        for (_, body), at in zip(requests, times, strict=True)
    ]
    np.random.seed(SEED)
    with contextlib.redirect_stdout(io.StringIO()):
        return asyncio.run(
            benchmark(
                task_type=TaskType.GENERATION,
                endpoint_type=kind,
                api_url=server.url + path,
                base_url=server.url,
                model_id=model,
                model_name=model,
                tokenizer=None,
                input_requests=samples,
                logprobs=None,
                request_rate=load.rate,
                burstiness=1.0,
                disable_tqdm=not console(stderr=True).is_terminal,
                num_warmups=0,
                profile=False,
                selected_percentile_metrics=["ttft"],
                selected_percentiles=[99.0],
                ignore_eos=True,
                goodput_config_dict={},
                max_concurrency=load.at_once,
                lora_modules=None,
                extra_headers=None,
                extra_body=None,
                ready_check_timeout_sec=0,  # its test request would be the first prompt
                self_timed=load.timed,
            )
        )


def told_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of a run of vLLM's client; times of the requests that were answered."""
    pairs = zip(result["ttfts"], result["errors"], strict=True)
    ttfts = [ttft for ttft, error in pairs if not error and ttft] or [float("nan")]
    gaps = [gap for gaps in result["itls"] for gap in gaps]
    first = min(result["start_times"])
    return {
        "ttft_s": {
            "mean": mean(ttfts),
            "median": median(ttfts),
            "p99": sorted(ttfts)[min(len(ttfts) - 1, int(0.99 * len(ttfts)))],
        },
        "token_s": median(gaps) if gaps else None,
        "requests_per_s": result["request_throughput"],
        "prompt_tokens": result["total_input_tokens"],
        "failed": result["failed"],
        "error": next((error.splitlines()[-1] for error in result["errors"] if error), None),
        "ttfts_s": result["ttfts"],
        "sent_at_s": [at - first for at in result["start_times"]],
    }


def has_chat_template(server: Server) -> bool:
    """Whether the server takes chats."""
    hello = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    try:
        server.post("/v1/chat/completions", {"model": server.model()} | hello)
    except ServerError as error:
        if error.status not in (400, 404):
            raise
        return False
    return True


def make_known(server: Server, rows: Sequence[Row], salt: str) -> None:
    """Lets the server compute all chunks of the rows, for the tenants that a run has."""
    from vllm_blend.cli.warm import Count, by_requests

    by_tenant: dict[str, dict[str, None]] = {}
    for row in rows:
        texts = by_tenant.setdefault(str(row.values.get("tenant") or ""), {})
        texts.update(dict.fromkeys(row.chunks))
    for tenant, texts in by_tenant.items():
        for _ in by_requests(server, list(texts), salt + tenant, 4, Count()):
            pass


def write_sent(path: Path, rows: Sequence[Row], times: Sequence[float]) -> None:
    """The trace with the times that it had, as ``simulate`` takes it."""
    lines = [
        json.dumps(dict(row.values) | {"at": round(at, 4)})
        for at, row in sorted(zip(times, rows, strict=True), key=lambda pair: pair[0])
    ]
    path.write_text("".join(f"{line}\n" for line in lines))


def _show(results: Mapping[str, Any], gain: float) -> None:
    rows = []
    for way, told in results.items():
        times = [f"{told['ttft_s'][name]:.3f}" for name in ("mean", "median", "p99")]
        token = f"{1e3 * told['token_s']:.1f}" if told["token_s"] is not None else ""
        rows.append([way, *times, token, f"{told['requests_per_s']:.2f}"])
    heads = ("", "TTFT s, mean", "median", "p99", "ms a token", "requests/s")
    print_table(heads, rows, numbers=(1, 2, 3, 4, 5))
    found = results["blended"]["reuse"]
    say(
        f"\nchunks found {share(found['hit_rate'])}, tokens reused {share(found['reused_share'])}, "
        f"of all tokens {share(found['recomputed_share'])} recomputed"
    )
    say(f"TTFT {gain:.2f} times sooner (means)")
