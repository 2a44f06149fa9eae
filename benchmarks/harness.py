"""What the benchmarks share: prompts of a length, hardware, and the closing lines."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from vllm_blend import Blender
    from vllm_blend.api.prompts import BlendPrompt

INPUTS = pathlib.Path(__file__).parent.parent / "inputs"
QUESTION = "By whom was the project of the Corrie 11 led?"
"""The first of the documents tells."""


def samples() -> list[dict[str, Any]]:
    """The ten inputs, in order."""
    paths = sorted(INPUTS.glob("*.json"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text()) for path in paths]


def texts(sample: dict[str, Any]) -> list[str]:
    return [sample[str(i)] for i in range(sample["chunk_num"])]


def documents(tokenizer: Any, num_tokens: int, skip: int = 0) -> list[list[int]]:
    """Chunks of the inputs as token ids, ``num_tokens`` in all; the last one is cut to fit."""
    found: list[list[int]] = []
    left = num_tokens
    for text in [text for sample in samples() for text in texts(sample)][skip:]:
        ids = list(tokenizer.encode(text, add_special_tokens=False))[:left]
        if not ids:
            break
        found.append(ids)
        left -= len(ids)
    if left:
        raise ValueError(f"the inputs have {num_tokens - left} tokens; asked for {num_tokens}")
    return found


def prompt_of(blender: Blender, num_tokens: int, question: str = QUESTION) -> BlendPrompt:
    """A prompt of about ``num_tokens`` tokens over the inputs' chunks."""
    return blender.prompt(blender.chunks(documents(blender.tokenizer, num_tokens)), question)


def hardware() -> str:
    """One line: processor, cores, torch and vLLM."""
    import torch
    import vllm

    name = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0))
    return (
        f"{name}, {cores} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"vLLM {vllm.__version__}"
    )


def sm_clock() -> int | None:
    """MHz of the first GPU's multiprocessors now: a hot GPU lowers it. None without a GPU."""
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    clock = pynvml.nvmlDeviceGetClockInfo(pynvml.nvmlDeviceGetHandleByIndex(0), pynvml.NVML_CLOCK_SM)
    return int(clock)


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A Markdown table, ready for docs/benchmarks.md."""
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def measure(methods: dict[str, Callable[[], object]], repeat: int, name: str) -> dict[str, list[float]]:
    """Seconds of each method, round by round; they take turns, after one warm-up each."""
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for turn in tqdm(range(repeat + 1), desc=name, unit="round"):
        for method, run in methods.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[method].append(time.perf_counter() - start)
    return seconds
