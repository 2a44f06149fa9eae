"""The store's fault tests in full: how often each thing was broken, and what was counted.

python benchmarks/soak_store.py                  # everything, about an hour
python benchmarks/soak_store.py flips kills      # some; --share 0.1 for a tenth of each

A wrong KV served, or a request that failed, ends it with an error. Servers run on this machine; a small
tmpfs is mounted where that is allowed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / "store"), str(TESTS)]

COUNTS = {
    "kills": 1000,
    "flips": 10_000,
    "truncations": 2000,
    "full_disk": 5000,
    "read_only": 5000,
    "two_processes": 10_000,
    "redis_restarts": 50,
    "s3_failures": 600,
    "soak": 10_000,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(COUNTS))
    parser.add_argument("--share", type=float, default=1.0, help="of each case's count")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(COUNTS):
        parser.error(f"unknown case {min(unknown)!r}; allowed: {', '.join(COUNTS)}")
    logging.getLogger("vllm.vllm_blend.store").setLevel(logging.ERROR)  # thousands of warnings
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ[variable] = "test"
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    faults = importlib.import_module("faults")
    results = {}
    for name in arguments.cases or COUNTS:
        count = max(1, round(COUNTS[name] * arguments.share))
        start = time.perf_counter()
        if name in ("s3_failures", "soak"):
            with importlib.import_module("servers").s3_server() as endpoint:
                counts = getattr(faults, name)(count, endpoint)
        else:
            counts = getattr(faults, name)(count)
        seconds = time.perf_counter() - start
        print(f"{name}: {count} in {seconds:.0f} s, no wrong KV, no failed request", flush=True)
        for what, number in sorted(counts.items()):
            print(f"    {what}: {number}", flush=True)
        results[name] = {"count": count, **counts}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
