"""Rules M01...: what Megatron-Core itself refuses, or hangs or crashes on, and the C rules let through.

Where they need the model they give no verdict without a recipe. `tests/constraints/test_oracle.py` compares them with
Megatron-Core on thousands of points. Two stages with virtual stages and without overlapped P2P, which trains wrongly
and says nothing, cannot be asked for: the loop overlaps P2P whenever vp is set.
"""

from cloudai_mbridge.constraints.megatron import features, model, parallel, placement
from cloudai_mbridge.constraints.rule import rules_in

RULES = rules_in(placement, parallel, model, features)
