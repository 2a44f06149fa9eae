"""Runs methods on examples; the example scripts share it.

vllm-blend eval run --task musique --data musique.jsonl.gz --methods full reuse hkvd@0.16
vllm-blend eval run --task synthetic --synthetic cut --limit 100 --output out/cut
python example/blend_musique.py                                     # a small set of our own
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_blend.cli.eval.command import command_parser, data_set
from vllm_blend.cli.eval.data import Example, read_examples
from vllm_blend.cli.eval.methods import BEHIND, PLAIN, split_behind
from vllm_blend.cli.eval.synthetic import KINDS, synthetic
from vllm_blend.cli.eval.tasks import TASKS, Task

if TYPE_CHECKING:
    from vllm_blend.api.blender import Blender
    from vllm_blend.cli.eval.runner import Runner

METHODS = ("full", "prefix", "reuse", "hkvd@0.16", "hkvd@0.16:mask=bottom_right", "mapreduce")


def examples_parser(description: str | None, command: str | None = None) -> argparse.ArgumentParser:
    """Options of a run over examples, whatever methods it compares."""
    parser = command_parser(description, command)
    parser.add_argument(
        "--data", type=data_set, help=".json, .jsonl or .jsonl.gz (default: a small own set)"
    )
    parser.add_argument("--limit", type=int, help="examples (default: all)")
    parser.add_argument("--skip", type=int, default=0, help="of them, leave out the first ones (0)")
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M)")
    parser.add_argument("--policies", nargs="+", default=[], help="run each at every --ratios")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.05, 0.08, 0.16, 0.3])
    parser.add_argument("--chunk-tokens", type=int, default=512, help="cut longer passages (512)")
    parser.add_argument("--passage-tokens", type=int, help="cut off the rest of longer passages")
    parser.add_argument("--max-passages", type=int, help="of an example; gold ones first")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="prompts of about N tokens: passages are left out, or other examples' join them",
    )
    parser.add_argument("--kl-tokens", type=int, default=16, help="answer tokens that KL is over (16)")
    parser.add_argument("--max-tokens", type=int, help="of an answer (default: the task's)")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument(
        "--batch",
        type=int,
        default=1,
        metavar="N",
        help="examples whose requests run together; 1: one request at a time, which measures TTFT (1)",
    )
    parser.add_argument(
        "--engine",
        type=json.loads,
        default={},
        metavar="JSON",
        help='arguments of vLLM\'s LLM, e.g. {"dtype": "float16", "gpu_memory_utilization": 0.3}',
    )
    parser.add_argument(
        "--output", type=Path, help="results go on here (default: a new folder in .out/)"
    )
    return parser


def run_parser(description: str | None, command: str | None = None) -> argparse.ArgumentParser:
    """The same, and which methods."""
    parser = examples_parser(description, command)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="NAME")
    parser.add_argument(
        "--behind", choices=BEHIND, help="compute the chunks of all that blend after this (methods.py)"
    )
    parser.add_argument(
        "--no-answers", action="store_true", help="KL and agreement only, twice as fast"
    )
    return parser


def methods_of(options: argparse.Namespace) -> list[str]:
    """The methods that were asked for."""
    grid = [f"{policy}@{ratio:g}" for policy in options.policies for ratio in options.ratios]
    names = [*options.methods, *grid]
    if not options.behind:
        return names
    return [n if n in PLAIN or split_behind(n)[1] else f"{n}:behind={options.behind}" for n in names]


def make_blender(
    model: Path | None, max_model_len: int, head: str = "", chat: bool | None = False, **engine: Any
) -> Blender:
    """An in-process engine that prefills a prompt in one step, on text after ``head``.

    Prefix caching is on, since it is one of the methods; requests of others are salted apart.

    Args:
        chat: as ``Blender``'s; False: raw text.
        engine: arguments of ``LLM``, instead of those chosen here.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default takes most of the memory
    import torch
    from vllm import LLM

    from vllm_blend.api.blender import Blender
    from vllm_blend.api.embedded import embedded_model

    chosen: dict[str, Any] = dict(
        dtype="auto" if torch.cuda.is_available() else "float32",
        max_model_len=max_model_len,
        max_num_batched_tokens=max(max_model_len, 8192),
        enable_chunked_prefill=False,  # a prompt waits for a step that has room for all of it
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=False,
    )
    llm = LLM(model=str(model or embedded_model()), **chosen | engine)
    return Blender(llm, chat=chat, head=head, stand_in="")  # methods say what comes before a chunk


def runner_of(
    task_name: str, options: argparse.Namespace, answers: bool, default_output: str
) -> tuple[Runner, Task]:
    """What ``examples_parser``'s options say: an engine, the protocol, the folder, the task."""
    from vllm_blend.cli.eval.runner import Runner
    from vllm_blend.cli.eval.runs import Protocol

    task = TASKS[task_name]
    if options.max_tokens:
        task = replace(task, max_tokens=options.max_tokens)
    blender = make_blender(options.model, options.max_model_len, task.header, **options.engine)
    protocol = Protocol(
        options.model.name if options.model else "SmolLM2-135M-Instruct",
        options.chunk_tokens,
        options.kl_tokens,
        options.max_passages,
        answers,
        options.max_tokens,
        options.passage_tokens,
        str(options.engine.get("dtype", "auto")),
        options.prompt_tokens,
    )
    folder = options.output or Path(".out") / default_output
    return Runner(blender, protocol, folder, options.batch), task


def asked(
    runner: Runner, task: Task, examples: Sequence[Example], options: argparse.Namespace
) -> Sequence[Example]:
    """Those examples that the options say, with as many passages or at the length that they say; the
    others stay at hand as contexts."""
    if options.max_passages:
        examples = [example.with_passages(options.max_passages) for example in examples]
    if (tokens := options.prompt_tokens) is not None:
        try:
            examples = runner.of_length(task, examples, tokens)
        except ValueError as error:
            raise SystemExit(f"--prompt-tokens is {tokens}: example {error}") from None
    runner.pool = examples
    return examples[options.skip : options.limit]


def evaluate(
    task_name: str, examples: Sequence[Example], options: argparse.Namespace, default_output: str
) -> None:
    """Runs the methods on those examples that the options say, prints the table, leaves it in the
    output folder."""
    from vllm_blend.cli.eval.stats import summarize
    from vllm_blend.cli.eval.tables import write_tables

    methods = methods_of(options)
    runner, task = runner_of(task_name, options, not options.no_answers, default_output)
    try:
        results = runner.run(task, asked(runner, task, examples, options), methods)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    summaries = summarize(results)
    print(f"\n{runner.protocol.model}, score: {task.metric}; results in {runner.folder}\n")
    print(write_tables(summaries, runner.folder))


def run_task(
    task_name: str, own_data: Path, description: str | None, argv: Sequence[str] | None = None
) -> None:
    """An example script: one task, its own small set by default."""
    options = run_parser(description).parse_args(argv)
    examples = options.data or read_examples(own_data)
    evaluate(task_name, examples, options, task_name)


def main(argv: Sequence[str] | None = None) -> None:
    """Any task."""
    parser = run_parser(__doc__, "run")
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--synthetic", choices=KINDS, help="made-up examples instead of --data")
    parser.add_argument("--people", type=int, default=3, help="in a synthetic example (3)")
    options = parser.parse_args(argv)
    if (options.data is None) == (options.synthetic is None):
        parser.error("give --data or --synthetic")
    if options.synthetic:
        examples = synthetic(options.synthetic, options.limit or 100, options.people)
    else:
        examples = options.data
    evaluate(options.task, examples, options, options.synthetic or options.task)
