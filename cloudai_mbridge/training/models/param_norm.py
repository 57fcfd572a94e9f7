"""The L2 norm of all parameters of the model, each counted once whatever the layout."""

import math
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch.distributed.tensor import DTensor, Replicate

from cloudai_mbridge.training.compat import quantized
from cloudai_mbridge.training.process.device import current_device

# (of an expert, a shard of the distributed optimizer's) -> this rank's share of the parameters
_Shares = dict[tuple[bool, bool], list[torch.Tensor]]


def param_is_not_shared(param: torch.nn.Parameter) -> bool:
    """Return whether this is not the second copy of a tied embedding, on another stage than the first."""
    return not getattr(param, "shared", False)


@torch.no_grad()
def calc_params_l2_norm(
    model: Any, model_config: Any, use_megatron_fsdp: bool = False, force_create_fp32_copy: bool = False
) -> float:
    """Return the L2 norm of the whole model's parameters, the same on every rank. Every rank must call it.

    model: this rank's chunks. Half-precision parameters are taken at fp32: the optimizer's main parameters if it
    keeps them, unless `force_create_fp32_copy`, which widens the model's own.

    Raises RuntimeError: `use_megatron_fsdp`, and a parameter is not a DTensor. AssertionError: an expert's parameter is
    marked as shared.
    """
    chunks = model if isinstance(model, list) else [model]
    if use_megatron_fsdp:
        return _fsdp_norm(chunks)
    params = list({id(param): param for chunk in chunks for param in chunk.parameters()}.values())
    shares: _Shares = defaultdict(list)
    sharding_group: Any = None  # of parameters that are themselves sharded over it
    for param in params:
        is_expert = not getattr(param, "allreduce", True)
        assert not is_expert or param_is_not_shared(param), "a parameter of an expert is marked as shared"
        tp_group = mpu.get_expert_tensor_parallel_group() if is_expert else mpu.get_tensor_model_parallel_group()
        if not param_is_not_shared(param) or not param_is_not_tensor_parallel_duplicate(param, tp_group):
            continue
        if isinstance(param, DTensor):
            sharding_group = param.device_mesh.get_group()
            shares[is_expert, False].append(param.to_local().float())
        elif param.dtype == torch.float32 or not hasattr(param, "main_param") or force_create_fp32_copy:
            shares[is_expert, False].append(quantized.values(param).float())
        elif param.main_param is not None:
            shares[is_expert, bool(getattr(param, "main_param_sharded", False))].append(param.main_param)
    has_experts = bool(getattr(model_config, "num_moe_experts", None))
    return math.sqrt(_sum_over_ranks(shares, sharding_group, has_experts))


def _sum_over_ranks(shares: _Shares, sharding_group: Any, has_experts: bool) -> float:
    """Add up the squares. All ranks run the same collectives, with or without parameters of a kind."""
    kinds = [(is_expert, is_shard) for is_expert in (False, True) for is_shard in (False, True)]
    dense, dense_shards, expert, expert_shards = torch.stack([_squares(shares[kind]) for kind in kinds]).unbind()
    _all_reduce(dense, sharding_group)
    _all_reduce(dense_shards, mpu.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True))
    dense = dense + dense_shards
    model_group = mpu.get_model_parallel_group()
    if not has_experts:
        return float(_all_reduce(dense, model_group).item())
    _all_reduce(expert_shards, mpu.get_expert_data_parallel_group(partial_expert_data_parallel=True))
    expert = expert + expert_shards
    expert_group = mpu.get_expert_tensor_model_pipeline_parallel_group()
    if dist.get_process_group_ranks(model_group) == dist.get_process_group_ranks(expert_group):
        return float(_all_reduce(dense + expert, model_group).item())
    return float((_all_reduce(dense, model_group) + _all_reduce(expert, expert_group)).item())


def _squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares in float64: norms per tensor in fp32, in one kernel if available."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=current_device())
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()


def _all_reduce(value: torch.Tensor, group: Any) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(value, group=group)
    return value


def _fsdp_norm(chunks: list[Any]) -> float:
    for chunk in chunks:
        if hasattr(chunk, "stop_communication"):
            chunk.stop_communication()  # from here on the chunk has its shards for parameters
    params = list({id(param): param for chunk in chunks for param in chunk.parameters()}.values())
    if others := [param for param in params if not isinstance(param, DTensor)]:
        raise RuntimeError(f"Megatron-FSDP is on, and {len(others)} parameters are not DTensors")
    kinds: dict[bool, list[Any]] = {False: [], True: []}  # the experts' or others
    for param in params:
        # Megatron-FSDP leaves the marks on the original parameters
        is_expert = not getattr(getattr(param, "orig_param", param), "allreduce", True)
        if param_is_not_shared(param):
            kinds[is_expert].append(param)
    dense, expert = (calc_dtensor_params_l2_norm(kinds[is_expert]) ** 2 for is_expert in (False, True))
    square = torch.tensor(expert, dtype=torch.float64, device=current_device())
    _all_reduce(square, mpu.get_expert_model_parallel_group())  # which their meshes do not contain
    return math.sqrt(float(_all_reduce(square + dense, mpu.get_pipeline_model_parallel_group()).item()))


@torch.no_grad()
def calc_dtensor_params_l2_norm(params: Any) -> float:
    """Return the L2 norm of DTensors, replicas counted once. Every rank of their meshes must call it.

    Raises RuntimeError: a placement is neither a shard nor a replica: partial sums have no norm.
    """
    by_spec: dict[Any, list[torch.Tensor]] = {}
    for param in params:
        for placement in param.placements:
            if not placement.is_shard() and not isinstance(placement, Replicate):
                raise RuntimeError(f"no norm of a DTensor that is {placement}: only shards and replicas have one")
        by_spec.setdefault((param.device_mesh, param.placements), []).append(param.to_local().float())
    total = 0.0
    for (mesh, placements), tensors in by_spec.items():
        square = _squares(tensors)
        for dim, placement in enumerate(placements):
            if placement.is_shard():
                _all_reduce(square, mesh.get_group(dim))
        total += float(square.item())
    return math.sqrt(total)
