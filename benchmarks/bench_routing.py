"""What several servers find where requests go to them in turn, and where chunks say to which.

Makes a seeded trace, documents by Zipf's law, four fifths of a request's out of one topic, and
simulates it (``vllm-blend simulate --replicas``): the real scheduler, no model. What is found depends
on how many documents a server holds, not on their lengths, so they are short. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from harness import print_table

from vllm_blend import embedded_model

WORDS = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=6400, help="of the trace (6400)")
    parser.add_argument("--documents", type=int, default=4000, help="of the corpus (4000)")
    parser.add_argument("--topics", type=int, default=100, help="1: any documents together (100)")
    parser.add_argument("--chunks", type=int, default=5, help="documents a request (5)")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--ram-gb", type=float, nargs="+", default=[0.4, 2], help="of a server")
    options = parser.parse_args()
    rows, results = [], []
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder, "trace.jsonl")
        trace.write_text("".join(json.dumps(row) + "\n" for row in requests(options)))
        for ram_gb in options.ram_gb:
            found = simulate(trace, options.replicas, ram_gb)
            held = ram_gb * 1e9 / (found["all_chunks_bytes"] / len(known(trace)))
            alone = {"servers": 1, "routed": "", "busiest": 1.0} | found
            for one in (alone, *found["replicas"]):
                share = f"{min(held / options.documents, 1):.0%}"
                named = {key: one[key] for key in ("servers", "routed", "hit_rate", "reused_share")}
                results.append({"ram_gb": ram_gb, "held": held, **named, "busiest": one["busiest"]})
                cells = [f"{one['hit_rate']:.0%}", f"{one['reused_share']:.0%}"]
                rows.append([share, one["servers"], one["routed"], *cells, f"{one['busiest']:.2f}"])
    heads = ["of the documents a server holds", "servers", "routed", "chunks found", "tokens reused"]
    print_table([*heads, "busiest / mean"], rows)
    named = {key: value for key, value in vars(options).items() if key not in ("replicas", "ram_gb")}
    print(json.dumps({**named, "results": results}))


def requests(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of a trace."""
    choose = random.Random(0)
    words = [f"{choose.getrandbits(24):06x}" for _ in range(500)]
    texts = [
        f"{number}: {' '.join(choose.choices(words, k=WORDS))}" for number in range(options.documents)
    ]
    size = options.documents // options.topics
    ranks = {count: [1 / (rank + 1) for rank in range(count)] for count in (options.topics, size)}
    for number in range(options.requests):
        (topic,) = choose.choices(range(options.topics), ranks[options.topics])
        chosen: dict[int, None] = {}
        while len(chosen) < options.chunks:
            of = topic if choose.random() < 0.8 else choose.randrange(options.topics)
            chosen[of * size + choose.choices(range(size), ranks[size])[0]] = None
        order = choose.sample(list(chosen), len(chosen))
        yield {"chunks": [texts[n] for n in order], "question": f"What does number {number} ask?"}


def known(trace: pathlib.Path) -> set[str]:
    """The trace's documents."""
    return {text for line in trace.read_text().splitlines() for text in json.loads(line)["chunks"]}


def simulate(trace: pathlib.Path, replicas: list[int], ram_gb: float) -> Any:
    """What ``vllm-blend simulate`` tells."""
    settings = json.dumps({"ram_gb": ram_gb, "log_requests": False})
    counts = [word for count in replicas for word in ("--replicas", str(count))]
    command = [sys.executable, "-m", "vllm_blend", "simulate", str(trace), str(embedded_model())]
    command += ["--json", "--cache-gb", "1", "--settings", settings, *counts]
    command += ["--", "--dtype", "float32", "--max-model-len", "4096"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


if __name__ == "__main__":
    main()
