"""Evaluation: how much of full prefill's quality a way of reusing KV keeps.

vllm-blend eval COMMAND      run, tune, across, compare, worst or report

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
diagnose.py   deviation by token and layer, rank correlation, attention deviation
figures.py    the same drawn
app.py        the commands' names
run.py        a command, and what the example scripts share; tune.py, across.py, compare.py, worst.py,
              report.py: a command each
"""
