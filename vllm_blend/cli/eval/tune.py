"""Finds the smallest ratio, and the policy that needs it, at a stated quality on the user's prompts.

    vllm-blend eval tune --data my_prompts.jsonl --task musique --quality 0.9 \\
        --settings blend.json

Quality is the share of full reuse's KL to full prefill that blending removes, over the first answer
tokens: 0 is full reuse, 1 full prefill. Each policy is tried on chunks computed after the head alone,
and on chunks computed after a stand-in, the passages of another of the prompts.

The settings file is for a server's ``additional_config["vllm_blend"]``; for
``BlendSettings.from_mapping`` without its ``stand_in``, which the ``Blender`` takes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_blend.cli.eval.data import Example
from vllm_blend.cli.eval.methods import blend_settings
from vllm_blend.cli.eval.run import asked, examples_parser, runner_of
from vllm_blend.cli.eval.runner import Runner
from vllm_blend.cli.eval.stats import Summary, summarize
from vllm_blend.cli.eval.tables import interval, percent
from vllm_blend.cli.eval.tasks import TASKS, Task
from vllm_blend.core.settings import BlendSettings

POLICIES = ("static", "ahead", "ahead*static", "hkvd", "ahead*hkvd")
BEHIND_OTHERS = ":behind=others"
RATIOS = (0.02, 0.05, 0.08, 0.12, 0.16, 0.22, 0.3, 0.4, 0.5, 0.7)


def tune(
    runner: Runner,
    task: Task,
    examples: Sequence[Example],
    quality: float,
    policies: Sequence[str] = POLICIES,
    ratios: Sequence[float] = RATIOS,
    stand_in: bool = True,
    kinds: Sequence[str] | None = None,
) -> Summary | None:
    """Tries every policy at each ratio, from the smallest ratio on, until one has the quality.

    Policies that need a layer loop are left out for models that have none. With ``stand_in`` each is
    tried on chunks computed after another example's passages too, if there is another example. With
    ``kinds`` it is tried with these ends of a method's name instead (``methods.py``).

    Returns:
        The best method of the first ratio at which there is one; None if there is none at any. Its
        ``recovered`` is of what full reuse after the head loses.

    Raises:
        ValueError: if ``quality`` is not in [0, 1], or if an example has no other to take a stand-in
            from.
    """
    if not 0 <= quality <= 1:
        raise ValueError(f"quality is {quality}; allowed: 0 to 1")
    if runner.blender.model.blending.loop is None:
        policies = [policy for policy in policies if BlendSettings(policy=policy).early]
    if kinds is None:
        kinds = ["", BEHIND_OTHERS] if stand_in and len(runner.pool or examples) > 1 else [""]
    for ratio in sorted(ratios):
        names = [f"{policy}@{ratio:g}{kind}" for policy in policies for kind in kinds]
        found = summarize(runner.run(task, examples, ["reuse", *names]))
        reuse = next(s.kl.value for s in found if s.method == "reuse" and s.kl is not None)
        tried = [
            dataclasses.replace(s, recovered=1 - s.kl.value / reuse if reuse else 1.0)
            for s in found
            if s.method in names and s.kl is not None
        ]
        good = [s for s in tried if (s.recovered or 0.0) >= quality]
        if good:
            return max(good, key=lambda summary: summary.recovered or 0.0)
    return None


def settings_of(method: str) -> dict[str, Any]:
    """The settings of a method that are not the defaults, ready for JSON; the ratio in any case."""
    settings, default = blend_settings(method), BlendSettings()
    if settings is None:
        raise ValueError(f"method {method!r} does not blend")
    values = dataclasses.asdict(settings)
    always = ("policy", "recomp_ratio")
    return {k: v for k, v in values.items() if k in always or v != getattr(default, k)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = examples_parser(__doc__, "tune")
    parser.add_argument("--task", choices=TASKS, required=True, help="how the prompts are put")
    parser.add_argument("--quality", type=float, default=0.9, help="share of the KL to remove (0.9)")
    parser.add_argument("--settings", type=Path, default=Path("blend.json"), help="file to write")
    parser.add_argument("--no-stand-in", action="store_true", help="all chunks after the head alone")
    parser.set_defaults(policies=list(POLICIES), ratios=list(RATIOS))
    options = parser.parse_args(argv)
    if options.data is None:
        parser.error("--data is needed: the prompts to tune on")
    runner, task = runner_of(options.task, options, False, "tune")
    try:
        examples = asked(runner, task, options.data, options)
        best = tune(
            runner,
            task,
            examples,
            options.quality,
            options.policies,
            options.ratios,
            not options.no_stand_in,
        )
    except ValueError as error:
        parser.error(str(error))
    if best is None:
        parser.exit(
            1, f"no policy removes {options.quality:.0%} at ratios up to {max(options.ratios)}\n"
        )
    assert best.kl is not None
    values = settings_of(best.method) | {"stand_in": ""}
    if best.method.endswith(BEHIND_OTHERS):
        values["stand_in"] = runner.blender.tokenizer.decode(runner.stand_in(task, examples[0]))
    options.settings.write_text(json.dumps(values, indent=1) + "\n")
    faster = "" if best.speedup is None else f"; TTFT {best.speedup:.2f}x faster than full prefill"
    print(
        f"{best.method}: removes {percent(best.recovered)} of full reuse's KL, which leaves "
        f"{interval(best.kl, 4)} (n={best.n}){faster}. Written to {options.settings}"
    )
