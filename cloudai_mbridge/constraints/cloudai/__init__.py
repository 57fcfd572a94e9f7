"""Rules C01-C18: CloudAI's constraints of the MegatronBridge workload, same verdict on the same inputs.

C02 and C08 accept everything in CloudAI. Here they are real where the number of layers is known, and give no verdict
where it is not. C18 also accepts an explicit pipeline layout.
"""

from cloudai_mbridge.constraints.cloudai import cuda_graphs, pipeline, sizes
from cloudai_mbridge.constraints.rule import rules_in

RULES = rules_in(sizes, pipeline, cuda_graphs)
