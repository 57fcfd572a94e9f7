"""Train several configurations one after another in the same processes, which spares the start of Python and torch.

Arguments: the configuration files. Before each run the last rank prints "LAYOUT {name of the file}".
"""

import os
import sys
from pathlib import Path

# ruff: noqa: E402 - Megatron-Core is imported as the training program does: first, and without torch's compiler on a CPU
from cloudai_mbridge.training.cpu import import_megatron

import_megatron()

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.gpt_step import forward_step
from cloudai_mbridge.training.pretrain import pretrain
from cloudai_mbridge.training.process.device import bind_local_device
from cloudai_mbridge.training.process.log_lines import write_line


def main(paths: list[Path]) -> None:
    if "MASTER_ADDR" in os.environ:  # else each run is a process group of its own
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        bind_local_device(backend)
        dist.init_process_group(backend)
    for path in paths:
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            write_line(f"LAYOUT {path.stem}")
        pretrain(ConfigContainer.from_yaml(path), forward_step)
        forget_layout()
    if dist.is_initialized():
        dist.destroy_process_group()


def forget_layout() -> None:
    """Take down Megatron's groups, so that the next run makes its own."""
    if dist.is_initialized():
        dist.barrier()
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
        destroy_num_microbatches_calculator()


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
