"""Does KV drift that is kept from blended prompts, used in blended prompts whose KV is kept, and so on?

An example's chunks are kept from a full prefill of them in another order (generation 1). For each
further generation half of them, of the generation before, are reused in a prompt in which the other
half is new and kept, and the other way round, in an order that is drawn anew. Each generation then
serves the example's own prompt: KL to full prefill, over the answer that full prefill gives. Beside it:
chunks that were computed by themselves, as ``"harvest": false`` has it. Last, one JSON object.

    python benchmarks/bench_generations.py --task wikimqa --data wikimqa.jsonl.gz --limit 30
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
from collections.abc import Sequence
from dataclasses import replace

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default takes most of the memory

import numpy as np
from harness import hardware, print_table
from tqdm import tqdm
from vllm import LLM, SamplingParams

from vllm_blend import Blender, BlendSettings, embedded_model
from vllm_blend.api.prompts import Chunk
from vllm_blend.cli.eval import asking, forcing
from vllm_blend.cli.eval.data import Example, read_examples
from vllm_blend.cli.eval.tasks import TASKS, Task
from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import EXTRA_ARG, BlendPlan, CollectPlan

SETTINGS = {
    "reuse": BlendSettings(policy="static", recomp_ratio=0.0),
    "static 8%": BlendSettings(policy="static", recomp_ratio=0.08),
    "ahead*static 8%": BlendSettings(policy="ahead*static", recomp_ratio=0.08),
}
SERVED = BlendSettings(policy="static", recomp_ratio=0.08)
"""With which the prompts run whose KV is kept."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, help="model folder (default: SmolLM2-135M)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="JSONL, as the evaluation's")
    parser.add_argument("--limit", type=int, default=30, help="examples (30)")
    parser.add_argument("--max-passages", type=int, help="of an example")
    parser.add_argument("--passage-tokens", type=int, help="of a passage")
    parser.add_argument("--generations", type=int, nargs="+", default=[1, 2, 5])
    options = parser.parse_args()
    llm = LLM(
        model=str(options.model or embedded_model()),
        dtype=options.dtype,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    blender = Blender(llm, chat=False, scored=True)
    task = TASKS[options.task]
    examples = read_examples(options.data, options.limit)
    if options.max_passages:
        examples = [example.with_passages(options.max_passages) for example in examples]
    rows = []
    for seed, example in enumerate(tqdm(examples, unit="example")):
        args = blender, task, example, options.passage_tokens, options.generations, seed
        rows.append(distances(*args))
        named = {f"{name}, {kind}": kl for (name, kind), kl in rows[-1].items()}
        print(json.dumps({"example": example.id, "kl": named}), flush=True)
    kinds = [f"generation {count}" for count in options.generations] + ["by themselves"]
    draw = np.random.default_rng(0).integers(0, len(rows), (2000, len(rows)))
    found = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    table, results = [], []
    for name in SETTINGS:
        for kind in kinds:
            apart = found[name, kind] - found[name, kinds[0]]
            low, high = np.quantile(apart[draw].mean(1), [0.025, 0.975])
            mean = float(found[name, kind].mean())
            table.append([name, kind, f"{mean:.4f}", f"{apart.mean():+.4f} [{low:+.4f}, {high:+.4f}]"])
            results.append(
                {"method": name, "chunks": kind, "kl": mean, "less_generation_1": [low, high]}
            )
    print(f"\n{hardware()}; {options.task}, {len(rows)} examples\n")
    print_table(["method", "chunks", "KL to full prefill", f"less {kinds[0]}"], table)
    print(json.dumps({"task": options.task, "examples": len(rows), "results": results}))


def distances(
    blender: Blender,
    task: Task,
    example: Example,
    passage_tokens: int | None,
    generations: Sequence[int],
    seed: int,
) -> dict[tuple[str, str], float]:
    """KL of an example's prompt, by settings and kind of its chunks."""
    ids = blender.token_ids(task.chunks(blender.tokenizer, example, 512, passage_tokens))
    head = blender.head_ids(task.header)
    alone = blender.obtain(
        [(head + (blender.stand_in if at else ()), one) for at, one in enumerate(ids)]
    )
    kinds = {"by themselves": alone}
    choose, kvs = random.Random(seed), {}
    order = choose.sample(range(len(ids)), len(ids))
    for generation in range(1, max(generations) + 1):
        if generation == 1:
            kvs = keep(blender, task, example, alone, {}, order)
        else:
            order = choose.sample(order, len(order))
            half = len(order) // 2
            new = keep(blender, task, example, alone, {i: kvs[i] for i in order[:half]}, order)
            order = order[half:] + order[:half]
            known = {i: kvs[i] for i in order[: len(order) - half]}
            kvs = new | keep(blender, task, example, alone, known, order)
        if generation in generations:
            kinds[f"generation {generation}"] = [
                Chunk(chunk.token_ids, kvs[at]) for at, chunk in enumerate(alone)
            ]
    asked = {
        kind: asking.Asker(
            blender, task, example, chunks, blender.prompt(chunks, task.ask(example), head=task.header)
        )
        for kind, chunks in kinds.items()
    }
    (full,) = forcing.full_prefill([asked["by themselves"]], 16)
    items = [(name, kind) for name in SETTINGS for kind in kinds]
    found = [forcing.distances([(asked[kind], SETTINGS[name], full)])[0].kl for name, kind in items]
    for chunk in alone:
        blender.forget(chunk)
    return dict(zip(items, found, strict=True))


def keep(
    blender: Blender,
    task: Task,
    example: Example,
    chunks: Sequence[Chunk],
    known: dict[int, StoredKV],
    order: Sequence[int],
) -> dict[int, StoredKV]:
    """KV of the chunks that are not known, kept from one prompt of all in this order."""
    prompt = blender.prompt(
        [Chunk(chunks[at].token_ids, known.get(at)) for at in order],
        task.ask(example),
        head=task.header,
    )
    place, plans = len(blender.head_ids(task.header)), {}
    for at in order:
        end = place + len(chunks[at].token_ids)
        if at not in known:
            plans[at] = CollectPlan(place, num_prompt_tokens=end)
        place = end
    spans = prompt.spans if known else ()
    plan = BlendPlan(spans, SERVED, harvest=tuple(plans.values()))
    params = SamplingParams(max_tokens=1, temperature=0, extra_args={EXTRA_ARG: plan})
    blender.llm.generate([{"prompt_token_ids": prompt.token_ids}], params, use_tqdm=False)
    kept = {}
    for at, part in plans.items():
        assert part.is_whole
        kv = chunks[at].kv
        assert kv is not None
        kept[at] = replace(StoredKV(tuple(part.kv)), scores=kv.scores)
    return kept


if __name__ == "__main__":
    main()
