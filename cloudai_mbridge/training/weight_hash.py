"""Do the data-parallel replicas still hold the same weights, bit by bit?

Replicas that drift apart (a broken GPU, a lost update) train on without an error. A hash of every parameter finds it.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from cloudai_mbridge.training.device import current_device
from cloudai_mbridge.training.utils.log_lines import write_line

_DIGEST_BYTES = 16
_MAX_NAMES = 5


def check_param_hashes_across_dp_replicas(model: list[Any]) -> bool:
    """Return whether every parameter has the same bits on all its replicas. A collective over all ranks.

    Dense parameters are replicated over the data- and context-parallel ranks, experts over the expert-data-parallel
    ones. Every rank gets the same answer; a rank that differs from its replica 0 prints the first names.
    Copies each parameter to the host: too slow for every step.
    """
    named = [(f"chunk {i}: {name}", param) for i, chunk in enumerate(model) for name, param in chunk.named_parameters()]
    dense = {name: param for name, param in named if getattr(param, "allreduce", True)}
    experts = {name: param for name, param in named if name not in dense}
    differing = _differing(dense, mpu.get_data_parallel_group(with_context_parallel=True))
    differing += _differing(experts, mpu.get_expert_data_parallel_group())
    if differing:
        more = f" and {len(differing) - _MAX_NAMES} more" if len(differing) > _MAX_NAMES else ""
        names = ", ".join(differing[:_MAX_NAMES])
        write_line(f"rank {dist.get_rank()}: weights differ from those of the first replica: {names}{more}")
    equal = torch.tensor([not differing], dtype=torch.uint8, device=current_device())
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    return bool(equal.item())


def _differing(params: dict[str, Any], group: Any) -> list[str]:
    """Return the names of the parameters whose hash is not that of the group's first rank."""
    if not params or group.size() == 1:
        return []
    mine = torch.stack([_hash(param) for param in params.values()]).to(current_device())
    first = mine.clone()
    dist.broadcast(first, group=group, group_src=0)
    equal = (mine == first).all(1).tolist()
    return [name for name, is_equal in zip(params, equal, strict=True) if not is_equal]


def _hash(param: Any) -> torch.Tensor:
    """Hash the bits, the data type and the shape; a CPU tensor of bytes."""
    data = param.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{data.dtype} {tuple(data.shape)}".encode(), digest_size=_DIGEST_BYTES)
    digest.update(data.reshape(-1).view(torch.uint8).numpy())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)
