"""The L2 norm of all parameters of the model, each counted once whatever the layout."""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch.distributed.tensor import DTensor, Replicate

from cloudai_mbridge.training.process.device import current_device


def param_is_not_shared(param: torch.nn.Parameter) -> bool:
    """Return whether this is not the second copy of a tied embedding, on another stage than the first."""
    return not getattr(param, "shared", False)


@torch.no_grad()
def calc_params_l2_norm(
    model: Any, model_config: Any, use_megatron_fsdp: bool = False, force_create_fp32_copy: bool = False
) -> float:
    """Return the L2 norm of the whole model's parameters, the same on every rank. Every rank must call it.

    model: this rank's chunks. Half-precision parameters are taken at fp32: the optimizer's main parameters where it
    keeps them, unless `force_create_fp32_copy`, which widens the model's own.

    Raises:
        RuntimeError: `use_megatron_fsdp`, and a parameter is not a DTensor.
        AssertionError: an expert's parameter is marked as shared.
    """
    chunks = model if isinstance(model, list) else [model]
    params = list({id(param): param for chunk in chunks for param in chunk.parameters()}.values())
    if use_megatron_fsdp:
        return _fsdp_norm(chunks, params)
    buckets = _Buckets(force_create_fp32_copy)
    for param in params:
        buckets.add(param)
    return math.sqrt(_sum_over_ranks(buckets, has_experts=bool(getattr(model_config, "num_moe_experts", None))))


class _Buckets:
    """This rank's share of the parameters, sorted by the ranks that hold the other shares."""

    def __init__(self, force_create_fp32_copy: bool) -> None:
        self._force_copy = force_create_fp32_copy
        self.dense: list[torch.Tensor] = []
        self.dense_shards: list[torch.Tensor] = []  # of the distributed optimizer
        self.expert: list[torch.Tensor] = []
        self.expert_shards: list[torch.Tensor] = []
        self.data_parallel_group: Any = None  # of parameters that are themselves sharded over it

    def add(self, param: Any) -> None:
        is_expert = not getattr(param, "allreduce", True)
        if is_expert:
            assert param_is_not_shared(param), "a parameter of an expert is marked as shared"
        tp_group = mpu.get_expert_tensor_parallel_group() if is_expert else mpu.get_tensor_model_parallel_group()
        if not param_is_not_shared(param) or not param_is_not_tensor_parallel_duplicate(param, tp_group):
            return
        value, is_shard = self._fp32(param)
        if value is None:
            return
        if is_shard:
            (self.expert_shards if is_expert else self.dense_shards).append(value)
        else:
            (self.expert if is_expert else self.dense).append(value)

    def _fp32(self, param: Any) -> tuple[torch.Tensor | None, bool]:
        """Return (the values, whether they are a shard of the distributed optimizer's)."""
        if isinstance(param, DTensor):
            self.data_parallel_group = param.device_mesh.get_group()
            return param.to_local().float(), False
        if param.dtype != torch.float32 and hasattr(param, "main_param") and not self._force_copy:
            return param.main_param, getattr(param, "main_param_sharded", False)
        return param.float(), False


def _sum_over_ranks(buckets: _Buckets, has_experts: bool) -> float:
    """Add up the squares. All ranks run the same collectives, with or without parameters of a kind."""
    squares = torch.stack(
        [_squares(each) for each in (buckets.dense, buckets.dense_shards, buckets.expert, buckets.expert_shards)]
    )
    dense, dense_shards, expert, expert_shards = squares.unbind()
    _all_reduce(dense, buckets.data_parallel_group)
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
    """Return the sum of squares in float64: norms per tensor in fp32, in one kernel where there is one."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=current_device())
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()


def _all_reduce(value: torch.Tensor, group: Any) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(value, group=group)
    return value


def _fsdp_norm(chunks: list[Any], params: list[Any]) -> float:
    for chunk in chunks:
        if hasattr(chunk, "stop_communication"):
            chunk.stop_communication()
    if others := [param for param in params if not isinstance(param, DTensor)]:
        raise RuntimeError(f"Megatron-FSDP is on, and {len(others)} parameters are not DTensors")
    return calc_dtensor_params_l2_norm(params)


@torch.no_grad()
def calc_dtensor_params_l2_norm(params: Any) -> float:
    """Return the L2 norm of DTensors, replicas counted once. Every rank of their meshes must call it.

    Raises:
        RuntimeError: a placement is neither a shard nor a replica: partial sums have no norm.
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
