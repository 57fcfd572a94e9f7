"""The embedded Megatron-Core training loop: a self-contained program run under torchrun on the compute nodes.

It imports the standard library, torch and megatron.core only, and talks to the rest of the product through two
contracts: the config file that it reads (`config`) and the log lines that it writes (`process.log_lines`).
"""

from cloudai_mbridge.training import upstream

upstream.serve(__name__)
