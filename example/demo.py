"""Ten questions over several documents: which answers are right, and how soon, with and without reuse.

A question stands after 1,400 to 2,400 tokens of retrieved text. Full prefill computes all of it; with
reuse each chunk's KV was computed once before, and some tokens are computed anew. An answer is right if
its first line contains the expected one. The questions were chosen for a small model; 2 and 8 need two
chunks. Runs on a CPU with the embedded one:

    python example/demo.py
    python example/demo.py --model MODEL_FOLDER --recomp-ratio 0.3 --inputs my/*.json
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import time
from dataclasses import dataclass, replace
from statistics import median

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the model runs in this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default takes most of the memory

from common import Answer, make_llm
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from vllm import SamplingParams

from vllm_blend import Blender, BlendSettings, embedded_model
from vllm_blend.api.prompts import BlendPrompt

INPUTS = pathlib.Path(__file__).parent.parent.glob("inputs/*.json")
GREEDY = SamplingParams(temperature=0, max_tokens=24, stop=["\n"])
# Every prompt begins with this: a small model answers better after worked examples than by a chat.
HEAD = """The questions are answered from the texts.

The lamp at Fell Point was lit by Anton Reiss, a careful man. Anton Reiss was born in 1851 \
and kept bees.
Question: By whom was the lamp at Fell Point lit, and in what year was he born?
Answer: The lamp at Fell Point was lit by Anton Reiss. Anton Reiss was born in 1851.

The bakery in Quarry Lane is owned by Mina Torp, who sings. Before that Mina Torp worked as a teacher.
Question: By whom is the bakery in Quarry Lane owned, and as what did she work before?
Answer: The bakery in Quarry Lane is owned by Mina Torp. Mina Torp worked as a teacher."""


def normalized(text: str) -> str:
    """The words of a text's first line, in lower case, with a space around each."""
    words = re.findall(r"\w+", text.strip().partition("\n")[0].lower())
    return f" {' '.join(words)} "


@dataclass
class Row:
    """A question, its expected answer, and the two given."""

    question: str
    expected: str
    full: Answer
    reuse: Answer
    recomputed: float

    def is_right(self, answer: Answer) -> bool:
        return normalized(self.expected) in normalized(answer.text)

    @property
    def speedup(self) -> float:
        return self.full.ttft / self.reuse.ttft

    def cells(self) -> list[str | Text]:
        """What the table shows of it."""
        answers: list[str | Text] = []
        for answer in (self.full, self.reuse):
            word, style = ("right", "green") if self.is_right(answer) else ("wrong", "red")
            text = Text.assemble((word, f"bold {style}"), f": {answer.text}")
            answers += [text, f"{answer.ttft:.2f}"]
        return [self.question, *answers, f"{self.speedup:.1f}x", f"{self.recomputed:.0%}"]


def ask(blender: Blender, prompt: BlendPrompt, blend: bool) -> Answer:
    """One request, alone."""
    output = blender.generate(prompt, GREEDY, blend=blend)
    return Answer(output.outputs[0].text.strip(), output.metrics.first_token_latency)


def print_summary(console: Console, rows: list[Row], once: float) -> None:
    """How many answers are right, how soon they came, and what that means."""
    full = sum(row.is_right(row.full) for row in rows)
    reuse = sum(row.is_right(row.reuse) for row in rows)
    speedup, share = median(row.speedup for row in rows), median(row.recomputed for row in rows)
    console.print(
        f"right: full prefill [bold]{full} of {len(rows)}[/], "
        f"with reuse [bold]{reuse} of {len(rows)}[/]\n"
        f"With {share:.0%} of a prompt computed anew the first token came [bold]{speedup:.1f} times[/] "
        f"sooner (medians), and {reuse} answers were right, by full prefill {full}.\n"
        f"Computing the chunks' KV beforehand took {once:.0f} s, which is in no TTFT. "
        "The questions were chosen so that a small model answers most of them in both ways; what reuse "
        "costs on questions that nobody chose is in docs/quality.md.",
        highlight=False,
        soft_wrap=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, help="model folder (default: SmolLM2-135M)")
    parser.add_argument("--inputs", type=pathlib.Path, nargs="+", default=INPUTS, metavar="JSON")
    parser.add_argument(
        "--recomp-ratio", type=float, help="share of the chunks' tokens recomputed (0.08)"
    )
    options = parser.parse_args()

    settings = BlendSettings()
    if options.recomp_ratio is not None:
        settings = replace(settings, recomp_ratio=options.recomp_ratio)
    blender = Blender(make_llm(options.model or embedded_model()), settings, chat=False, head=HEAD)
    console = Console(width=None if os.isatty(1) else 120)
    table = Table("question", "full prefill", "TTFT s", "with reuse", "TTFT s", "sooner", "recomputed")
    rows: list[Row] = []
    once = 0.0  # seconds
    with Live(table, console=console):
        for path in sorted(options.inputs, key=lambda p: (len(p.name), p.name)):
            sample = json.loads(path.read_text())
            start = time.perf_counter()
            chunks = blender.chunks([sample[str(i)] for i in range(sample["chunk_num"])])
            prompt = blender.prompt(chunks, sample["query"])
            once += time.perf_counter() - start
            if not rows:  # the first request of each kind pays for what is set up once
                ask(blender, prompt, blend=True)
                ask(blender, prompt, blend=False)
            reuse = ask(blender, prompt, blend=True)
            computed = len(blender.model.cache_fuse_metadata["imp_indices"])
            full = ask(blender, prompt, blend=False)
            question = sample["query"].partition("\n")[0].removeprefix("Question: ")
            share = computed / len(prompt.token_ids)
            rows.append(Row(question, sample["answer"], full, reuse, share))
            table.add_row(*rows[-1].cells(), end_section=True)
            for chunk in chunks:
                blender.forget(chunk)

    if not console.is_terminal:
        console.print()  # a table that was not live ends without a new line
    print_summary(console, rows, once)


if __name__ == "__main__":
    main()
