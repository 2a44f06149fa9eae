"""What the example scripts share: an in-process LLM, one timed request, the closing table."""

from __future__ import annotations

import json
import pathlib
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


def make_llm(model: pathlib.Path, max_model_len: int = 4096) -> LLM:
    """An in-process LLM that prefills a prompt in one step and reports TTFT.

    Prefix caching is off, so that the baseline is a full prefill each time.
    """
    import torch
    from vllm import LLM

    options: dict[str, Any] = {}
    if not torch.cuda.is_available():
        config = json.loads((model / "config.json").read_text())
        # kernels of quantized weights are for 16 bits
        options["dtype"] = "bfloat16" if "quantization_config" in config else "float32"
    return LLM(
        model=str(model),
        max_model_len=max_model_len,
        max_num_batched_tokens=max_model_len,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
        **options,
    )


@dataclass
class Answer:
    """Generated text and the time from request to first token, in seconds."""

    text: str
    ttft: float


def ask(llm: LLM, token_ids: list[int], params: SamplingParams) -> Answer:
    """One request, alone."""
    prompt: Any = {"prompt_token_ids": token_ids}
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return Answer(output.outputs[0].text.strip(), output.metrics.first_token_latency)


@dataclass
class Row:
    """One sample of the closing table."""

    sample: str
    num_tokens: int
    reference: str
    cached: Answer
    normal: Answer

    @property
    def speedup(self) -> float:
        return self.normal.ttft / self.cached.ttft


def report(row: Row) -> Row:
    """Prints a sample's two generations above the progress bar."""
    tqdm.write(f"[{row.sample}] {row.num_tokens} tokens; expected: {row.reference}")
    for name, answer in (("cached", row.cached), ("normal", row.normal)):
        tqdm.write(f"  {name} generation, TTFT {answer.ttft:6.3f} s: {answer.text!r}")
    return row


def summary(rows: list[Row], **settings: Any) -> None:
    """Prints the closing table, one line of totals, and one line of JSON."""
    print(f"\n{'sample':>8} {'tokens':>7} {'cached TTFT':>12} {'normal TTFT':>12} {'speedup':>8}  same")
    for row in rows:
        same = "yes" if row.cached.text == row.normal.text else "no"
        print(
            f"{row.sample:>8} {row.num_tokens:7d} {row.cached.ttft:10.3f} s {row.normal.ttft:10.3f} s "
            f"{row.speedup:7.2f}x  {same}"
        )
    cached, normal = median(r.cached.ttft for r in rows), median(r.normal.ttft for r in rows)
    speedup = median(r.speedup for r in rows)
    print(
        f"\nmedian TTFT {cached:.3f} s with reused KV, {normal:.3f} s in full prefill: {speedup:.2f}x\n"
    )
    result = {
        **settings,
        "median_ttft_cached_s": cached,
        "median_ttft_normal_s": normal,
        "median_speedup": speedup,
        "samples": [asdict(row) for row in rows],
    }
    print(json.dumps(result))
