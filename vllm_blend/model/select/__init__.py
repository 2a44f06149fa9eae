"""Which tokens of the reused chunks are recomputed: scores in, rows out.

rows.py       deviation of stored KV, and the rows of the highest scores
view.py       what a policy may look at: fresh and stored KV at the check layer, places, the question
question.py   attention from the question to the chunks, at one layer or over a pass of its own
policies.py   the policies, by the name that ``BlendSettings.policy`` gives them
"""

from vllm_blend.model.select.check_layer import CheckLayerCandidates as CheckLayerCandidates
from vllm_blend.model.select.policies import choose_rows as choose_rows
from vllm_blend.model.select.ranking import deviation as deviation
from vllm_blend.model.select.ranking import top_rows as top_rows
