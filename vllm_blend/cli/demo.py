"""``vllm-blend demo``: ten questions over documents to a small real model, in full and blended."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_blend.cli.engine_args import engine_options, first_line
from vllm_blend.cli.options import Arguments, Json, folder_or_name
from vllm_blend.cli.output import (
    console,
    found_wrong,
    help_text,
    print_json,
    quiet_vllm,
    say,
    working,
    wrong_call,
)

if TYPE_CHECKING:
    from vllm_blend.api.blender import Blender
    from vllm_blend.api.prompts import BlendPrompt

INPUTS = Path(__file__).parent / "demo_inputs"
MAX_MODEL_LEN = 4096
MAX_TOKENS = 24
# Every prompt begins with this: a small model answers better after worked examples than by a chat.
HEAD = """The questions are answered from the texts.

The lamp at Fell Point was lit by Anton Reiss, a careful man. Anton Reiss was born in 1851 \
and kept bees.
Question: By whom was the lamp at Fell Point lit, and in what year was he born?
Answer: The lamp at Fell Point was lit by Anton Reiss. Anton Reiss was born in 1851.

The bakery in Quarry Lane is owned by Mina Torp, who sings. Before that Mina Torp worked as a teacher.
Question: By whom is the bakery in Quarry Lane owned, and as what did she work before?
Answer: The bakery in Quarry Lane is owned by Mina Torp. Mina Torp worked as a teacher."""

HELP = help_text(
    """Ask a small real model ten questions over several documents, by full prefill and blended: which
    answers are right, and how soon the first token comes.

    A question stands after 1,400 to 2,400 tokens of text. Full prefill computes all of it; blended,
    each document's KV was computed once before, and some tokens are computed anew. The model comes from
    a PyPI package; no model hub is needed. The questions were chosen so that a model of 135M parameters
    answers most of them in both ways: what reuse costs on others is in docs/quality.md.""",
    "vllm-blend demo",
    "vllm-blend demo --limit 3",
    "vllm-blend demo --model MODEL -- --dtype bfloat16",
)


def demo(
    arguments: Arguments = None,
    model: Annotated[
        str | None, typer.Option(help="Another model than SmolLM2-135M.", callback=folder_or_name)
    ] = None,
    recomp_ratio: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of the chunks' tokens recomputed (0.08).")
    ] = None,
    inputs: Annotated[
        list[Path] | None, typer.Option(help="Other questions: JSON files as those of inputs/.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many questions.")] = None,
    as_json: Json = False,
) -> None:
    quiet_vllm()
    try:
        samples = [read_sample(path) for path in inputs or own_inputs()][:limit]
        options = engine_options(arguments or [])
        with working("loading the model"):
            blender, folder = load(model, recomp_ratio, options)
    except (ValueError, OSError, RuntimeError) as error:
        raise wrong_call(first_line(error)) from None
    rows: list[Row] = []
    for row in asked(blender, samples):
        rows.append(row)
        if not as_json:
            _show(len(rows), row)
    told = summary(rows)
    if as_json:
        print_json(told | {"model": folder, "questions": [row.told() for row in rows]})
    else:
        _conclude(told, folder, str(blender.llm.model_config.dtype).removeprefix("torch."))
    if told["right_blended"] < told["right_full_prefill"] - max(1, len(rows) // 10):
        raise found_wrong()


@dataclass(frozen=True)
class Sample:
    """A question over documents, and what a right answer contains."""

    chunks: tuple[str, ...]
    query: str
    answer: str

    @property
    def question(self) -> str:
        """Without what a prompt has around it."""
        return self.query.partition("\n")[0].removeprefix("Question: ")


@dataclass(frozen=True)
class Answer:
    """Generated text, and the time from request to first token, in seconds."""

    text: str
    ttft: float


@dataclass(frozen=True)
class Row:
    """A question, and the answers to it.

    Attributes:
        prepared_s: the documents' KV, computed once before.
    """

    sample: Sample
    num_tokens: int
    num_computed: int
    prepared_s: float
    full: Answer
    blended: Answer

    def is_right(self, answer: Answer) -> bool:
        """Whether its first line contains the expected answer."""
        return words(self.sample.answer) in words(answer.text)

    @property
    def speedup(self) -> float:
        return self.full.ttft / self.blended.ttft

    def told(self) -> dict[str, Any]:
        answers = {"full_prefill": self.full, "blended": self.blended}
        return {
            "question": self.sample.question,
            "expected": self.sample.answer,
            "tokens": self.num_tokens,
            "computed": self.num_computed,
            **{name: asdict(one) | {"right": self.is_right(one)} for name, one in answers.items()},
        }


def own_inputs() -> list[Path]:
    return sorted(INPUTS.glob("*.json"), key=lambda path: (len(path.name), path.name))


def read_sample(path: Path) -> Sample:
    """Raises ValueError or OSError where the file is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        chunks = tuple(str(values[str(at)]) for at in range(values["chunk_num"]))
        return Sample(chunks, str(values["query"]), str(values["answer"]))
    except (ValueError, KeyError, TypeError) as error:
        expected = "an object with chunk_num, the chunks as 0, 1, ..., query and answer"
        raise ValueError(f"{path}: expected {expected} ({error!r})") from None


def load(
    model: str | None, recomp_ratio: float | None, options: Mapping[str, Any]
) -> tuple[Blender, str]:
    """A blender whose prompts begin with ``HEAD``, and the model's folder."""
    from vllm_blend.api.blender import Blender
    from vllm_blend.api.embedded import embedded_model
    from vllm_blend.cli.eval.run import make_blender
    from vllm_blend.core.settings import BlendSettings

    folder = model or str(embedded_model())
    settings = BlendSettings()
    if recomp_ratio is not None:
        settings = replace(settings, recomp_ratio=recomp_ratio)
    engine = {"enable_prefix_caching": False, "use_tqdm_on_load": False} | dict(options)
    llm = make_blender(Path(folder), MAX_MODEL_LEN, **engine).llm
    return Blender(llm, settings, chat=False, head=HEAD), folder


def asked(blender: Blender, samples: Sequence[Sample]) -> Iterator[Row]:
    """Each question in both ways, one request at a time."""
    for number, sample in enumerate(samples):
        start = time.perf_counter()
        with working(f"question {number + 1}: computing the KV of {len(sample.chunks)} documents"):
            chunks = blender.chunks(list(sample.chunks))
            prompt = blender.prompt(chunks, sample.query)
        prepared = time.perf_counter() - start
        with working(f"question {number + 1}: asking"):
            if not number:  # the first request of each kind pays for what is set up once
                _ask(blender, prompt, blend=True)
                _ask(blender, prompt, blend=False)
            blended = _ask(blender, prompt, blend=True)
            computed = len(blender.model.cache_fuse_metadata["imp_indices"])
            full = _ask(blender, prompt, blend=False)
        for chunk in chunks:
            blender.forget(chunk)
        yield Row(sample, len(prompt.token_ids), computed, prepared, full, blended)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Right answers, and medians."""
    return {
        "asked": len(rows),
        "right_full_prefill": sum(row.is_right(row.full) for row in rows),
        "right_blended": sum(row.is_right(row.blended) for row in rows),
        "speedup": median(row.speedup for row in rows),
        "computed_share": median(row.num_computed / row.num_tokens for row in rows),
        "prepared_s": sum(row.prepared_s for row in rows),
    }


def words(text: str) -> str:
    """Those of a text's first line, in lower case, with a space around each."""
    found = re.findall(r"\w+", text.strip().partition("\n")[0].lower())
    return f" {' '.join(found)} "


def _ask(blender: Blender, prompt: BlendPrompt, blend: bool) -> Answer:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, stop=["\n"])
    output = blender.generate(prompt, greedy, blend=blend)
    return Answer(output.outputs[0].text.strip(), output.metrics.first_token_latency)


def _show(number: int, row: Row) -> None:
    say(f"{number}. {row.sample.question}")
    for name, answer in (("full prefill", row.full), ("blended", row.blended)):
        right = row.is_right(answer)
        style, word = ("green", "right") if right else ("red", "wrong")
        gain = "" if answer is row.full else f" [{row.speedup:.1f} times sooner]"
        line = console()
        line.print(f"   {name:12} {answer.ttft:6.2f} s  ", end="", markup=False)
        line.print(word, style=style, end="")
        line.print(f"  {answer.text}{gain}", markup=False, soft_wrap=True)


def _conclude(told: Mapping[str, Any], folder: str, dtype: str) -> None:
    asked, full, blended = (told[name] for name in ("asked", "right_full_prefill", "right_blended"))
    say(f"\nright: full prefill {full} of {asked}, blended {blended} of {asked}")
    say(
        f"With {told['computed_share']:.0%} of a prompt computed anew the first token came "
        f"{told['speedup']:.1f} times sooner (medians). Computing the documents' KV once before took "
        f"{told['prepared_s']:.0f} s, which is in no time to first token.\n"
    )
    say("The model in a server, and on prompts of yours:")
    say(f"  vllm-blend serve {shlex.quote(folder)} --dtype {dtype}")
    say(f"  vllm-blend try {shlex.quote(folder)} prompts.jsonl")
