"""Rules M01...: points that pass the C rules, but that Megatron-Core itself rejects, or hangs or crashes on.

Rules that need the model give no verdict without a recipe. `tests/constraints/test_oracle.py` compares them with
Megatron-Core on thousands of points. Two stages with virtual stages and without overlapped P2P, which silently train
wrongly, cannot be requested: the loop overlaps P2P whenever vp is set.
"""

from cloudai_mbridge.constraints.megatron import features, model, parallel, placement
from cloudai_mbridge.constraints.rule import rules_in

RULES = rules_in(placement, parallel, model, features)
