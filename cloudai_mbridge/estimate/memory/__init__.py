"""Memory of every pipeline stage, before any GPU second is spent: named terms in bytes that add up.

Read in this order: `layout` (the request), `stages` (who holds which layers), `parameters` (exact), `states`,
`activations` (`saved_fused`, `saved_torch`), `other`, `estimate` (the answer). `reference` has the two
estimators of Megatron-Bridge, by name.
"""

from cloudai_mbridge.estimate.memory.arguments import expert_tp, layout_of
from cloudai_mbridge.estimate.memory.estimate import Assumptions, StageMemory, memory_per_stage, worst_stage
from cloudai_mbridge.estimate.memory.layout import Granularity, Implementation, ParallelLayout, Recompute
from cloudai_mbridge.estimate.memory.parameters import parameters_per_stage, total_parameters

__all__ = ["Assumptions", "Granularity", "Implementation", "ParallelLayout", "Recompute", "StageMemory"]
__all__ += ["expert_tp", "layout_of", "memory_per_stage", "parameters_per_stage", "total_parameters", "worst_stage"]
