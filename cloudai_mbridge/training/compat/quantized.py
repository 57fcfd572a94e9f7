"""Parameters that Transformer Engine keeps in 8 or 4 bits: their values, and gathering them outside of a forward pass.

Here every release of Megatron-Core acts as 0.19. Before, a forced gather left the transposes of the step before (up to
0.17), and MXFP8 parameters were not gathered again in the step after one, which left them in the gradients.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

# Whether weights in 4 bits are gathered: since 0.17
GATHERS_FP4 = any(field.name == "fp4_param_gather" for field in fields(DistributedDataParallelConfig))


def values(parameter: Any) -> torch.Tensor:
    """Return a parameter's values: itself, or widened to its nominal type if fewer bits are kept."""
    widened: torch.Tensor = parameter.dequantize() if is_float8tensor(parameter) else parameter
    return widened


def copy_main_params(optimizer: Any) -> None:
    """Copy the main parameters into the buffer that MXFP8 parameters are gathered from and gradients reduced in.

    The buffer has to be zero. The next forward pass gathers, and leaves zeros for the gradients.
    """
    for part in _distributed(optimizer):
        part._copy_main_params_to_param_buffer()
        for chunk in part.model_chunks:
            for group in _bucket_groups(chunk):
                group.param_gather_dispatched = False


@torch.no_grad()
def stage(optimizer: Any) -> None:
    """Prepare a forced gather of MXFP8 parameters. The gradients are lost."""
    chunks = {id(chunk): chunk for part in _distributed(optimizer) for chunk in part.model_chunks}
    for chunk in chunks.values():
        chunk.zero_grad_buffer()
    copy_main_params(optimizer)


def gather(chunk: Any) -> None:
    """Gather all parameters of a wrapped chunk whose forward pre-hooks are off. A collective."""
    groups = _bucket_groups(chunk)
    if all(hasattr(group, "_post_param_sync") for group in groups) or not any(map(is_float8tensor, chunk.parameters())):
        with torch.no_grad():
            chunk.start_param_sync(force_sync=True)
        return
    for group in groups:
        if group.param_gather_handle is None:
            group.param_gather_dispatched = False
        group.finish_param_sync(skip_next_bucket_dispatch=True)  # dispatches first what is not


def _distributed(optimizer: Any) -> Iterator[Any]:
    """Yield the distributed optimizers with parameters of this rank."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer) and not getattr(part, "is_stub_optimizer", False):
            yield part


def _bucket_groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
