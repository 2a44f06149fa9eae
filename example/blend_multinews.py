"""Multi-News: one summary of several articles; Rouge-L of blending beside full prefill.

    python example/blend_multinews.py                               # our own small set, SmolLM2
    python example/blend_multinews.py --data multinews.json --limit 100 --model MODEL_FOLDER
    python example/blend_multinews.py --methods full reuse --policies hkvd ahead --ratios 0.08 0.16

--data takes the paper's JSON (a list of {"ctxs": [{"title", "text"}], "question", "answers"}), or the
same as .jsonl or .jsonl.gz. The protocol is the paper's: chunks of at most 512 tokens, Rouge-L. Results
are kept in .out/multinews (--output): a run that was stopped goes on where it was.
"""

import pathlib

from vllm_blend.cli.eval.run import run_task

OWN = pathlib.Path(__file__).parent.parent / "inputs/eval/multinews.json"

if __name__ == "__main__":
    run_task("multinews", OWN, __doc__)
