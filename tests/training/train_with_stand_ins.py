"""Train on a CPU with stand-ins for what captures CUDA graphs, several configurations one after another.

Megatron-Core's own wrapper of the full iteration runs, with its static buffers: a captured graph is a stand-in that
runs the schedule again on the buffers. Transformer Engine's helper is a stand-in that prints what is asked of it.
"""

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# ruff: noqa: E402
from cloudai_mbridge.training import cpu

cpu.install()

import torch
import torch.distributed as dist
from megatron.core import full_cuda_graph
from megatron.core import parallel_state as mpu
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs as layer_graphs

from cloudai_mbridge.training import step
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.config.rules import validate
from cloudai_mbridge.training.gpt_step import forward_step
from cloudai_mbridge.training.loop import param_hooks
from cloudai_mbridge.training.loop.between_steps import EarlyExit
from cloudai_mbridge.training.pretrain import pretrain
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.startup import unsupported


def say(text: str) -> None:
    """Write a line on the last rank, which writes those of the steps too."""
    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        write_line(text)


CAPTURING: list["Graph"] = []


class Graph:
    """A captured schedule: a replay runs it on the static buffers, and computes nothing of its own."""

    def __init__(self) -> None:
        self.call: dict[str, Any] = {}

    def register_generator_state(self, state: Any) -> None: ...

    def replay(self) -> None:
        stage = "validation" if self.call["forward_only"] else "training"
        buffers = [iter(StaticBufferLoader.static_buffers[stage])]
        FullCudaGraphWrapper.result[stage] = SCHEDULE()(**{**self.call, "data_iterator": buffers})


@contextlib.contextmanager
def capture(graph: Graph, **options: Any) -> Any:
    CAPTURING.append(graph)
    yield
    CAPTURING.pop()
    say(f"CAPTURED {'validation' if graph.call['forward_only'] else 'training'}")


def schedule(**call: Any) -> Any:
    """Run Megatron's schedule; while a graph is captured, nothing runs."""
    if CAPTURING:
        CAPTURING[-1].call = call
        return None
    return SCHEDULE()(**call)


class Helper:
    """Stands for `TECudaGraphHelper`: it has captured no more than its own name."""

    def __init__(self, *, model: Any, config: Any, seq_length: int, micro_batch_size: int, optimizers: Any) -> None:
        self.model, self.created, self.count = model, False, 0
        say(f"HELPER {seq_length} {micro_batch_size} {len(optimizers)} {config.cuda_graph_impl}")

    def graphs_created(self) -> bool:
        return self.created

    def create_cudagraphs(self) -> None:
        self.created = True
        self.count += 1
        say(f"CREATE {self.count} hooks={param_hooks.are_enabled(self.model)}")

    def cuda_graph_set_manual_hooks(self) -> None:
        say(f"MANUAL hooks={param_hooks.are_enabled(self.model)}")

    def delete_cuda_graphs(self) -> None:
        assert self.created
        self.created = False
        say("DELETE")


SCHEDULE = step.get_forward_backward_func
gpu: Any = torch.cuda
gpu.CUDAGraph, gpu.graph, gpu.graph_pool_handle = Graph, capture, lambda: None
gpu.set_stream = lambda stream: None
gpu.get_device_capability = lambda device=None: (10, 0)
full_cuda_graph.get_all_rng_states = dict
get_cuda_rng_tracker().use_cudagraphable_rng = True
layer_graphs.TECudaGraphHelper = Helper
unsupported._lacking = set
step.get_forward_backward_func = lambda: schedule
validate.CHECKS = tuple(check for check in validate.CHECKS if check.__name__ != "sync_te_rng_tracker")


def forget_layout() -> None:
    """Take down Megatron's groups, so that the next run makes its own."""
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
        destroy_num_microbatches_calculator()


def main(paths: list[Path]) -> None:
    if "MASTER_ADDR" in os.environ:  # else each run is a process group of its own
        dist.init_process_group("gloo")
    for path in paths:
        say(f"LAYOUT {path.stem}")
        with contextlib.suppress(EarlyExit):
            pretrain(ConfigContainer.from_yaml(path), forward_step)
        left = SimpleNamespace(graphs=FullCudaGraphWrapper.cuda_graph, buffers=StaticBufferLoader.static_buffers)
        assert not any(left.graphs.values()), left
        assert not any(left.buffers.values()), left
        forget_layout()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
