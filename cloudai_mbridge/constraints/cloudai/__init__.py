"""Rules C01-C18: CloudAI's constraints of the MegatronBridge workload, same verdict on the same inputs.

C02 and C08 accept everything in CloudAI. Here they check a known number of layers, and give no verdict on an unknown
number. C18 also accepts an explicit pipeline layout.
"""

from cloudai_mbridge.constraints.cloudai import cuda_graphs, pipeline, sizes
from cloudai_mbridge.constraints.rule import rules_in

RULES = rules_in(sizes, pipeline, cuda_graphs)
