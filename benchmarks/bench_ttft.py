"""Time to first token: stock full prefill against blending, side by side in one run.

A prompt is a chat turn over chunks of the inputs. The chunks' KV lies in one safetensors file a chunk;
blended times include opening the files, so the load counts. The methods take turns; printed are the
median time and the median of the rounds' ratios. "at the floor": full prefill, if only the rows that
blending computes cost time. A ``--question`` that asks for no passage, as a request for a summary, has
policies with ``ahead`` recompute twice as many. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default takes most of the memory

from harness import QUESTION, hardware, measure, print_table, prompt_of
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

from vllm_blend import Blender, BlendSettings, embedded_model
from vllm_blend.api.prompts import BlendPrompt
from vllm_blend.core.kv import StoredKV

PARAMS = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: shapes of real models (cpu)"
    )
    parser.add_argument(
        "--shape", nargs="+", default=["mistral-7b"], help="cuda: of ttft_shapes.py (mistral-7b)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="cuda: of the model (bfloat16)")
    parser.add_argument(
        "--attention-backend",
        nargs="+",
        default=["auto"],
        help="cuda: FLASH_ATTN, XFORMERS, ... in one table (vLLM's choice)",
    )
    parser.add_argument(
        "--prefix-caching", action="store_true", help="cuda: with vLLM's prefix cache on"
    )
    parser.add_argument("--eager", action="store_true", help="cuda: without torch.compile and graphs")
    parser.add_argument(
        "--kv",
        nargs="+",
        choices=("gpu", "pinned", "fp8"),
        default=["gpu", "pinned"],
        help="cuda: where stored KV is: on the GPU, in pinned memory, there in eight bits (gpu pinned)",
    )
    parser.add_argument(
        "--profile", nargs="+", default=[], help="cuda: methods whose time line to show, by name"
    )
    parser.add_argument(
        "--marks",
        nargs="+",
        default=[],
        help="cuda: methods to show when the host and the GPU come to which part of a step, by name",
    )
    parser.add_argument("--model", type=pathlib.Path, help="model folder (default: SmolLM2-135M)")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths to measure")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.05, 0.08, 0.16, 0.3])
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["static", "ahead*static", "hkvd"],
        help="how tokens are chosen",
    )
    parser.add_argument("--question", default=QUESTION, help="cpu: of the prompts")
    parser.add_argument("--repeat", type=int, default=7, help="counted runs of each (7)")
    parser.add_argument("--compile", action="store_true", help="stock torch.compile instead of eager")
    options = parser.parse_args()
    if options.device == "cuda":
        import ttft_shapes

        options.tokens = options.tokens or [4096, 8192, 16384, 32000]
        ttft_shapes.main(options)
        return
    options.tokens = options.tokens or [2000, 4000]

    longest = max(options.tokens) + 512
    llm = LLM(
        model=str(options.model or embedded_model()),
        dtype="float32",
        max_model_len=longest,
        max_num_batched_tokens=longest,
        enable_prefix_caching=False,
        enforce_eager=not options.compile,
    )
    blender = Blender(llm, scored=any("static" in policy for policy in options.policies))
    num_layers = blender.model.blending.kv_shape.num_layers
    rows, results = [], []
    with tempfile.TemporaryDirectory() as folder:
        for num_tokens in options.tokens:
            prompt = prompt_of(blender, num_tokens, options.question)
            files = save(prompt, pathlib.Path(folder))
            methods: dict[str, Callable[[], object]] = {
                "stock": partial(blender.generate, prompt, PARAMS, blend=False)
            }
            blends = {
                f"{policy} {ratio:.0%}": BlendSettings(recomp_ratio=ratio, policy=policy)
                for policy in options.policies
                for ratio in options.ratios
            }
            num_rows: dict[str, int] = {}
            for name, settings in blends.items():
                methods[name] = partial(
                    load_and_blend, blender, prompt, files, settings, num_rows, name
                )
            times = measure(methods, options.repeat, f"{len(prompt.token_ids)} tokens")
            stock = median(times["stock"])
            rows.append([len(prompt.token_ids), "stock", f"{stock:.3f} s", "1.00x", "", ""])
            results.append({"tokens": len(prompt.token_ids), "method": "stock", "ttft_s": stock})
            for name, settings in blends.items():
                ratio, blended = settings.recomp_ratio, times[name]
                ttft = median(blended)
                speedup = median(s / b for s, b in zip(times["stock"], blended, strict=True))
                kept = num_rows[name]
                whole_layers = 0 if settings.early else 1  # computed for all rows
                share = kept / len(prompt.token_ids)
                floor = stock * (whole_layers + (num_layers - whole_layers) * share) / num_layers
                rows.append(
                    [
                        len(prompt.token_ids),
                        name,
                        f"{ttft:.3f} s",
                        f"{speedup:.2f}x",
                        kept,
                        f"{stock / floor:.2f}x",
                    ]
                )
                results.append(
                    {
                        "tokens": len(prompt.token_ids),
                        "method": settings.policy,
                        "ratio": ratio,
                        "ttft_s": ttft,
                        "speedup": speedup,
                        "rows": kept,
                        "floor_s": floor,
                    }
                )
    where = f"{hardware()}, {'torch.compile' if options.compile else 'eager'}"
    print(f"\n{where}; {llm.llm_engine.model_config.model}\n")
    print_table(["tokens", "method", "TTFT", "speedup", "rows computed", "at the floor"], rows)
    print()
    print(json.dumps({"hardware": where, "repeat": options.repeat, "results": results}))


def load_and_blend(
    blender: Blender,
    prompt: BlendPrompt,
    files: list[pathlib.Path],
    settings: BlendSettings,
    num_rows: dict[str, int],
    name: str,
) -> None:
    """``num_rows[name]`` becomes the number of rows that were computed."""
    blender.generate(load(prompt, files), PARAMS, settings=settings)
    num_rows[name] = len(blender.model.cache_fuse_metadata["imp_indices"])


def save(prompt: BlendPrompt, folder: pathlib.Path) -> list[pathlib.Path]:
    """One file a chunk, with K and V of every layer."""
    files = []
    for number, span in enumerate(prompt.spans):
        files.append(folder / f"{len(prompt.token_ids)}-{number}.safetensors")
        layers = enumerate(span.kv.layers)
        tensors = {
            f"{kind}{i}": t.contiguous() for i, kv in layers for kind, t in zip("kv", kv, strict=True)
        }
        if span.kv.scores is not None:
            tensors["scores"] = span.kv.scores
        save_file(tensors, files[-1])
    return files


def load(prompt: BlendPrompt, files: list[pathlib.Path]) -> BlendPrompt:
    """The prompt, with its chunks' KV read anew."""
    spans = []
    for span, file in zip(prompt.spans, files, strict=True):
        tensors = load_file(file)
        layers = tuple((tensors[f"k{i}"], tensors[f"v{i}"]) for i in range(len(span.kv.layers)))
        spans.append(replace(span, kv=StoredKV(layers, tensors.get("scores"))))
    return BlendPrompt(prompt.token_ids, tuple(spans))


if __name__ == "__main__":
    main()
