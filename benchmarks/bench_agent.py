"""An agent's loop against a server that finds known text by itself, and against stock vLLM.

    python benchmarks/bench_agent.py --turns 200

The prompts of ``agent_trace.py``, one after the other, driven by vLLM's own ``bench serve`` client;
no client marks a chunk (``"auto": true``), and the prefix cache is on in both servers. While one is
measured the other is stopped. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from contextlib import ExitStack
from typing import Any

from agent_trace import prompts
from bench_cold import measure, start_both, suspended
from harness import hardware, print_table
from served import model_of, parser_of

QUARTERS = 4


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-tokens", type=int, default=8, help="a turn (8)")
    parser.add_argument("--settings", type=json.loads, default={}, help="of the server, as JSON")
    parser.add_argument("--server-args", default="--dtype float32 --max-model-len 8192")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(options, pathlib.Path(folder))


def run(options: argparse.Namespace, folder: pathlib.Path) -> None:
    """Starts both servers and prints what they did."""
    model = model_of(options, folder)
    settings = {"ram_gb": 4, "log_requests": False, "auto": True} | options.settings
    config = json.dumps({"vllm_blend": settings})
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        urls, processes = start_both(stack, model, options.server_args, config, folder)
        turns = list(prompts(options.turns, options.seed))
        size = -(-len(turns) // QUARTERS)
        for quarter in range(QUARTERS):
            part = turns[quarter * size : (quarter + 1) * size]
            for kind in sorted(urls, reverse=bool(quarter % 2)):
                with suspended([processes[other] for other in urls if other != kind]):
                    found = measure(urls[kind], kind, model, part, 1, options)
                found |= {"server": kind, "quarter": quarter + 1}
                print(json.dumps(found), flush=True)
                results.append(found)
    print(f"\n{hardware()}; {options.shape or model}; {options.turns} turns\n")
    rows = []
    for quarter in range(1, QUARTERS + 1):
        of = {r["server"]: r for r in results if r["quarter"] == quarter}
        blend, stock = of["blend"], of["stock"]
        row = [str(quarter)]
        for name in ("ttft_p50_s", "ttft_p95_s"):
            row += [f"{stock[name]:.3f}", f"{blend[name]:.3f}", f"{stock[name] / blend[name]:.2f}x"]
        rows.append(
            [*row, f"{blend['reused_share']:.0%}", f"{blend['tokens'] / blend['requests']:.0f}"]
        )
    head = ["quarter", "p50 of stock (s)", "blending", "", "p95 of stock (s)", "blending", ""]
    print_table([*head, "tokens reused", "tokens a prompt"], rows)
    print(json.dumps({"hardware": hardware(), "turns": options.turns, "results": results}))


if __name__ == "__main__":
    main()
