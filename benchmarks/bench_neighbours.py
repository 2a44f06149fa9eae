"""Does a chunk's KV tell what stood before it where it was kept, in a prompt that has none of that?

A town's note is kept from a prompt in which a note before it names the colour of a door there. Another
prompt has the town's note and an unrelated one, and asks for the colour: which of eight does the model
think likeliest? And which has become likelier most, against the same prompt with the town's note kept
behind the unrelated one? One of eight is chance. Beside it full prefill. Last line: JSON.

    python benchmarks/bench_neighbours.py --model FOLDER --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default takes most of the memory

from harness import hardware, print_table
from tqdm import trange
from vllm import LLM, SamplingParams

from vllm_blend import Blender, BlendSettings, embedded_model
from vllm_blend.api.prompts import BlendPrompt
from vllm_blend.cli.eval.stats import bootstrap

COLOURS = ("red", "blue", "green", "black", "white", "yellow", "brown", "gold")
HEAD = "Read the notes, and complete the sentence."
SETTINGS = {
    "reuse": BlendSettings(policy="static", recomp_ratio=0.0),
    "ahead*static 8%": BlendSettings(policy="ahead*static", recomp_ratio=0.08),
    "ahead*static 16%": BlendSettings(policy="ahead*static", recomp_ratio=0.16),
}
NOTE = (
    "{town} lies on a slow river between two hills. It has a market on Tuesdays, a school, a mill that "
    "still turns, and an archive. The archive of {town} was built after the fire, has two floors, and "
    "is looked after by a man who also rings the bells. Visitors write their names in a book."
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, help="model folder (default: SmolLM2-135M)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=36, help="towns (36)")
    options = parser.parse_args()
    llm = LLM(
        model=str(options.model or embedded_model()),
        dtype=options.dtype,
        max_model_len=2048,
        logprobs_mode="processed_logprobs",  # of the colours alone
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    blender = Blender(llm, chat=False, scored=True)
    choose, right = random.Random(0), dict[str, list[float]]()
    for _ in trange(options.limit, unit="town"):
        for name, found in case(blender, choose).items():
            right.setdefault(name, []).append(float(found))
    means = {name: bootstrap(found) for name, found in right.items()}
    rows = [[name, f"{m.value:.0%} [{m.low:.0%}, {m.high:.0%}]"] for name, m in means.items()]
    print(f"\n{hardware()}; {options.limit} towns\n")
    print_table(["prompt", "it is the note's colour"], rows)
    print(json.dumps({name: [m.value, m.low, m.high] for name, m in means.items()}))


def case(blender: Blender, choose: random.Random) -> dict[str, bool]:
    """By prompt: whether the colour that the note tells is the one."""
    town = "".join(
        choose.choice(part) for part in ("BDKLMRTV", "aeiou", ("lm", "rn", "st"), ("ar", "en"))
    )
    colour = choose.choice(COLOURS)
    other = f"The archive of {town} has one door. The door of the archive of {town} is {colour}."
    unrelated = "In winter the ferry does not run. The baker closes at noon, and dogs stay outside."
    telling, note, last = blender.token_ids([other, NOTE.format(town=town), unrelated])
    ask = f"The door of the archive of {town} is"
    head = blender.head_ids(HEAD)
    behind, alone, first = blender.obtain(
        [((*head, *telling), note), ((*head, *last), note), (head, last)]
    )
    told = blender.obtain([(head, telling), ((*head, *telling), note)])
    in_full = {
        "in full, with the note": told,
        "in full, without it": [first, alone],
    }
    found = {}
    for name, chunks in in_full.items():
        chances = chances_of(blender, blender.prompt(chunks, ask, head=HEAD), None)
        found[f"{name}: likeliest"] = likeliest(chances) == colour
    for name, settings in SETTINGS.items():
        kept, another = (
            chances_of(blender, blender.prompt([first, chunk], ask, head=HEAD), settings)
            for chunk in (behind, alone)
        )
        risen = {c: kept[c] - another[c] for c in COLOURS}
        found[f"kept behind the note, {name}: likeliest"] = likeliest(kept) == colour
        found[f"kept behind the note, {name}: likelier most"] = likeliest(risen) == colour
        found[f"kept behind another, {name}: likeliest"] = likeliest(another) == colour
    for chunk in (behind, alone, first, *told):
        blender.forget(chunk)
    return found


def chances_of(
    blender: Blender, prompt: BlendPrompt, settings: BlendSettings | None
) -> dict[str, float]:
    """Each colour's log probability to come next, by its first token; no settings: in full."""
    ids = {c: blender.tokenizer.encode(f" {c}", add_special_tokens=False)[0] for c in COLOURS}
    params = SamplingParams(
        temperature=0, max_tokens=1, logprobs=len(ids), allowed_token_ids=[*ids.values()]
    )
    out = blender.generate(prompt, params, settings=settings, blend=settings is not None)
    logprobs = out.outputs[0].logprobs[0]
    return {c: logprobs[token].logprob for c, token in ids.items()}


def likeliest(chances: dict[str, float]) -> str:
    return max(chances, key=lambda colour: chances[colour])


if __name__ == "__main__":
    main()
