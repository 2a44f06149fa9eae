"""What the plugin costs requests that do not blend: stock vLLM with it and without it, side by side.

    python benchmarks/bench_overhead.py                                 # SmolLM2-135M
    python benchmarks/bench_overhead.py --shape mistral-7b --tokens 4096    # a GPU, dummy weights

Two engines run at once, each in a process of its own, one with VLLM_PLUGINS empty, and take turns: a
prompt's first token, then the time of each further one. Their tokens must be the same. Shown are
medians, and the median of the rounds' ratios. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

OUTPUT_TOKENS = 65


def serve(options: argparse.Namespace) -> None:
    """One engine: a line in, a line with its times out."""
    from ttft_shapes import write_config
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        if options.shape is None:
            from vllm_blend import embedded_model

            model = embedded_model()
        else:
            model = write_config(options.shape, pathlib.Path(folder))
        llm = LLM(
            model=str(model),
            load_format="auto" if options.shape is None else "dummy",
            dtype=options.dtype,
            skip_tokenizer_init=True,
            max_model_len=options.tokens + OUTPUT_TOKENS,
            max_num_batched_tokens=options.tokens + OUTPUT_TOKENS,
            max_num_seqs=16,
            gpu_memory_utilization=0.4,
            kv_cache_memory_bytes=2 << 30,  # not by what the other engine leaves
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
    token_ids = [10 + (i * 7919) % 300 for i in range(options.tokens)]

    def seconds(num_tokens: int) -> tuple[float, list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False, ignore_eos=True)
        start = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
        return time.perf_counter() - start, list(output.outputs[0].token_ids)

    mode = str(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode)
    print("READY " + json.dumps({"cudagraph_mode": mode}), flush=True)
    for _ in sys.stdin:
        first, _ids = seconds(1)
        whole, ids = seconds(OUTPUT_TOKENS)
        times = {"ttft_s": first, "tpot_s": (whole - first) / (OUTPUT_TOKENS - 1), "ids": ids}
        print("TIMES " + json.dumps(times), flush=True)


class Engine:
    """An engine in a process of its own."""

    def __init__(self, plugins: bool) -> None:
        environment = os.environ | {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; read on a CPU alone
        }
        if not plugins:
            environment["VLLM_PLUGINS"] = ""
        self.process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.about: dict[str, Any] = {}

    def start(self) -> None:
        self.about = self._read("READY ")

    def times(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        return self._read("TIMES ")

    def _read(self, tag: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(tag):
                found: dict[str, Any] = json.loads(line.removeprefix(tag))
                return found
        raise RuntimeError(f"the engine ended with {self.process.wait()} before {tag}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", help="of ttft_shapes.py, with dummy weights (default: SmolLM2-135M)")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the prompt (1024)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeat", type=int, default=15, help="counted rounds (15)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return

    from harness import hardware, print_table
    from tqdm import tqdm

    stock, plugin = engines = [Engine(plugins=False), Engine(plugins=True)]
    try:
        for engine in engines:
            engine.start()
        rounds = []
        for turn in tqdm(range(options.repeat + 1), unit="round"):
            order = engines if turn % 2 else engines[::-1]
            times = {engine: engine.times() for engine in order}
            if times[stock]["ids"] != times[plugin]["ids"]:
                raise SystemExit("the plugin changed the tokens of a request that does not blend")
            if turn:
                rounds.append((times[stock], times[plugin]))
    finally:
        for engine in engines:
            engine.process.kill()
    rows, results = [], {}
    for name, title in (("ttft_s", "first token"), ("tpot_s", "each further token")):
        without, with_it = (median(pair[i][name] for pair in rounds) for i in (0, 1))
        ratio = median(pair[1][name] / pair[0][name] for pair in rounds)
        rows.append([title, f"{without * 1e3:.2f} ms", f"{with_it * 1e3:.2f} ms", f"{ratio:.3f}"])
        results[name] = {"stock": without, "plugin": with_it, "ratio": ratio}
    print(f"{options.shape or 'SmolLM2-135M'}, {options.tokens} tokens, {hardware()}, {plugin.about}")
    print_table(["", "stock", "with the plugin", "ratio"], rows)
    print(json.dumps({"tokens": options.tokens, "shape": options.shape, **plugin.about, **results}))


if __name__ == "__main__":
    main()
