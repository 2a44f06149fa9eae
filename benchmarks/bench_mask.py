"""What the exact mask is worth: KL(full prefill || blend) by ratio, exact against bottom-right.

Each input's question is followed by the answer that full prefill gives (teacher forcing); the
divergence is the mean over question and answer tokens, then over the inputs. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from statistics import mean

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default takes most of the memory

from harness import hardware, print_table, samples, texts
from tqdm import tqdm
from vllm import LLM, SamplingParams

from vllm_blend import Blender, BlendSettings, embedded_model
from vllm_blend.cli.eval.logits import kl_divergence, suffix_logits
from vllm_blend.core.settings import MASKS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, help="model folder (default: SmolLM2-135M)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.05, 0.16, 0.3, 0.5])
    parser.add_argument("--answer-tokens", type=int, default=32)
    options = parser.parse_args()

    llm = LLM(
        model=str(options.model or embedded_model()),
        dtype="float32",
        max_model_len=4096,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    blender = Blender(llm)
    answer = SamplingParams(temperature=0, max_tokens=options.answer_tokens, ignore_eos=True)
    found: dict[tuple[float, str], list[float]] = {(r, m): [] for r in options.ratios for m in MASKS}
    for sample in tqdm(samples(), unit="sample"):
        chunks = blender.chunks(texts(sample))
        asked = blender.prompt(chunks, sample["query"])
        forced = blender.generate(asked, answer, blend=False).outputs[0].token_ids
        prompt = blender.prompt(chunks, sample["query"], forced)
        full = suffix_logits(blender, prompt, blend=False)
        for ratio, mask in found:
            settings = BlendSettings(recomp_ratio=ratio, mask=mask)
            blended = suffix_logits(blender, prompt, settings=settings)
            found[ratio, mask].append(kl_divergence(full, blended))

    kl = {key: mean(values) for key, values in found.items()}
    print(f"\n{hardware()}; {llm.llm_engine.model_config.model}\n")
    rows = [[f"{r:.0%}", *(f"{kl[r, mask]:.4f}" for mask in MASKS)] for r in options.ratios]
    print_table(["ratio", *MASKS], rows)
    print()
    results = [
        {"ratio": r, "mask": m, "kl": value, "samples": found[r, m]} for (r, m), value in kl.items()
    ]
    print(json.dumps({"answer_tokens": options.answer_tokens, "results": results}))


if __name__ == "__main__":
    main()
