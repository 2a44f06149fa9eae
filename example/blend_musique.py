"""MuSiQue: questions that need two passages; F1 of blending beside full prefill.

    python example/blend_musique.py                               # our own small set, SmolLM2
    python example/blend_musique.py --data musique.json --limit 100 --model MODEL_FOLDER
    python example/blend_musique.py --methods full reuse --policies hkvd ahead --ratios 0.08 0.16

--data takes the paper's JSON (a list of {"ctxs": [{"title", "text"}], "question", "answers"}), or the
same as .jsonl or .jsonl.gz. The protocol is the paper's: chunks of at most 512 tokens, F1. Results
are kept in .out/musique (--output): a run that was stopped goes on where it was.
"""

import pathlib

from vllm_blend.cli.eval.run import run_task

OWN = pathlib.Path(__file__).parent.parent / "inputs/eval/musique.json"

if __name__ == "__main__":
    run_task("musique", OWN, __doc__)
