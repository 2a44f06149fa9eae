"""Evaluation: how much of full prefill's quality a way of reusing KV keeps.

data.py       examples, from the paper's JSON or from JSON lines
synthetic.py  tasks whose answer needs attention from chunk to chunk
tasks.py      prompts and scores of each data set
metrics.py    F1, Rouge-L, exact answers
methods.py    names of methods: full prefill, prefix caching, blending, MapReduce, MapRerank
asking.py     an answer by each of them
forcing.py    how far each is from full prefill, over the answer that full prefill gives
runner.py     runs methods on examples; a JSON line each, so that a run can go on where it stopped
stats.py      means, bootstrap intervals, differences to full prefill on the same prompts
tables.py     Markdown
across.py     tables over many runs
compare.py    two methods, example by example
worst.py      the examples at which a method is farthest from full prefill
cli.py        the command line of the example scripts
diagnose.py   deviation by token and layer, rank correlation, attention deviation
figures.py    the same drawn
report.py     one self-contained HTML page
tune.py       the smallest ratio and the policy for a stated quality
"""
