"""The two small matrices next to a linear layer, split over ranks as the layer is: B A x.

Both are split: A along the rank of the product, or the input if that is split already; B along the output.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import get_cuda_rng_tracker, mappings
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

from cloudai_mbridge.training.models.initialization import generator_of
from cloudai_mbridge.training.peft.config import AdapterConfig, DoRA
from cloudai_mbridge.training.peft.layers import BaseLayer
from cloudai_mbridge.training.process.device import current_device


class Matrix(torch.nn.Module):
    """This rank's shard [rows, columns] of a weight split over all ranks along `axis`; None: each rank has the whole.

    experts: grouped experts have a weight each, `weight0`, `weight1`, ...
    """

    def __init__(self, base: BaseLayer, rows: int, columns: int, axis: int | None, *, is_gated: bool = False) -> None:
        super().__init__()
        self.axis, self.base, self.experts, self.is_gated = axis, base, base.num_experts, is_gated
        for leaf in self.leaves:
            weight: Any = empty_parameter(base, rows, columns)
            for mark, value in base.marks.items():
                setattr(weight, mark, value)
            if axis is not None:
                weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, axis, 1
            self.register_parameter(leaf, weight)

    @property
    def leaves(self) -> list[str]:
        """Names of the weights."""
        return [f"weight{i}" for i in range(self.experts)] if self.experts else ["weight"]

    @property
    def weights(self) -> list[Any]:
        """The weights."""
        return [getattr(self, leaf) for leaf in self.leaves]

    def forward(self, x: torch.Tensor, splits: Any = None) -> torch.Tensor:
        """Return x times the weight; splits: how many of the rows of x are each expert's."""
        if not self.experts:
            return F.linear(x, self.weights[0])
        parts = torch.split(x, [int(size) for size in splits])
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, self.weights, strict=True)])

    @torch.no_grad()
    def fill(self, kind: str, name: str, seed: int) -> None:
        """Initialize the weights from the layout-independent whole; the kinds are Megatron-Bridge's."""
        if current_device().type == "meta":
            return  # a rehearsal has no values
        ranks = self.base.ranks if self.axis is not None else 1
        first = mpu.get_expert_model_parallel_rank() * self.experts
        for i, weight in enumerate(self.weights):
            # each expert's as in a model without grouped experts
            own = name.replace(".experts.", f".experts.local_experts.{first + i}.", 1) if self.experts else name
            rows, columns = (size * (ranks if axis == self.axis else 1) for axis, size in enumerate(weight.shape))
            generator = generator_of(own, seed, weight.device)
            value = torch.zeros(rows, columns, device=weight.device)
            if kind == "xavier":
                value.normal_(0.0, math.sqrt(2 / (rows + columns)), generator=generator)
            elif kind == "normal":
                value.normal_(0.0, 0.2, generator=generator)
            elif kind == "kaiming":  # of slope sqrt(5), which is 1 / sqrt(inputs)
                value.uniform_(-(columns**-0.5), columns**-0.5, generator=generator)
            weight.copy_(value if self.axis is None else value.chunk(ranks, self.axis)[self.base.rank])

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the sharded state; experts' as in Megatron-Core, whether grouped or not."""
        if not self.experts:
            return {f"{prefix}weight": self._sharded(self.weights[0], f"{prefix}weight", tuple(sharded_offsets))}
        size, rank = mpu.get_expert_model_parallel_world_size(), mpu.get_expert_model_parallel_rank()
        found = {}
        for i, (leaf, weight) in enumerate(zip(self.leaves, self.weights, strict=True)):
            place = (len(sharded_offsets), rank * self.experts + i, size * self.experts)
            sharded = self._sharded(weight, f"{prefix}weight", (*sharded_offsets, place))
            sharded.replica_id = (*sharded.replica_id[:2], mpu.get_expert_data_parallel_rank())
            found[f"{prefix}{leaf}"] = sharded
        return found

    def _sharded(self, weight: Any, key: str, offsets: tuple[Any, ...]) -> Any:
        return sharded_parameter(self.base, weight, key, self.axis, offsets, is_gated=self.is_gated)


def empty_parameter(base: BaseLayer, *shape: int) -> torch.nn.Parameter:
    """Return a parameter of the model's type on the device where it is to be initialized."""
    device = torch.device("cpu") if base.config.use_cpu_initialization else current_device()
    return torch.nn.Parameter(torch.empty(shape, dtype=base.config.params_dtype, device=device))


def sharded_parameter(
    base: BaseLayer, weight: Any, key: str, axis: int | None, offsets: tuple[Any, ...], *, is_gated: bool
) -> Any:
    """Return an entry of a sharded state; axis: along which the weight is split over the layer's ranks."""
    groups = {
        "tp_group": mpu.get_tensor_model_parallel_group() if axis is None else base.group,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    if axis is None:
        return make_sharded_tensor_for_checkpoint(weight, key, prepend_offsets=offsets, **groups)
    sharded = make_tp_sharded_tensor_for_checkpoint(weight, key, axis, prepend_offsets=offsets, **groups)
    return apply_swiglu_sharded_factory(sharded, offsets) if is_gated else sharded


class Adapter(torch.nn.Module):
    """The adapter of a layer whose weight is split over ranks, or of one part of it; DoRA's has a magnitude per row.

    dim: rank of the product.
    """

    def __init__(self, base: BaseLayer, peft: AdapterConfig, dim: int, seed: int) -> None:
        super().__init__()
        self.base, self.alpha, self.dim, self.p = base, peft.alpha, dim, peft.dropout
        self.is_dropped_first = peft.dropout_position == "pre"
        self.has_split_sequence = base.config.sequence_parallel
        self.exchanges = getattr(peft, "a2a_experimental", False)
        self.is_column = base.kind == "column"
        takes_whole = self.is_column and not base.is_reduced_outside and base.ranks > 1
        self.gathers_sequence = takes_whole and self.has_split_sequence
        self.copies_input = takes_whole and not self.has_split_sequence
        self.regathers = getattr(peft, "sequence_parallel_input_regather", False) and self.gathers_sequence
        rows, inner = base.out_size, dim // base.ranks if self.is_column else dim
        axes: tuple[int | None, int | None] = {"column": (0, 0), "row": (1, 0), "whole": (None, None)}[base.kind]
        if base.kind == "row":
            rows //= base.ranks
        self.linear_in = Matrix(base, inner, base.in_size, axes[0])
        self.linear_out = Matrix(base, rows, dim, axes[1], is_gated=base.is_gated)
        self.linear_in.fill(peft.lora_A_init_method, f"{base.name}.adapter.linear_in.weight", seed)
        self.linear_out.fill(peft.lora_B_init_method, f"{base.name}.adapter.linear_out.weight", seed)
        self.weight_magnitude: Any = None
        if isinstance(peft, DoRA):
            magnitude: Any = empty_parameter(base, base.out_size)
            magnitude.allreduce = base.marks["allreduce"]
            if self.is_column:
                magnitude.tensor_model_parallel, magnitude.partition_dim, magnitude.partition_stride = True, 0, 1
            else:  # with other tokens on each rank if the sequence is split
                magnitude.sequence_parallel = self.has_split_sequence
            self.weight_magnitude = magnitude

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return self.alpha / self.dim

    def forward(self, x: torch.Tensor, splits: Any = None) -> torch.Tensor:
        """Return the adapter's addend to the layer's output; splits: of grouped experts' tokens."""
        x = x.to(self.linear_in.weights[0].dtype)
        if self.is_dropped_first:
            x = self.drop(x, is_split=self.base.kind == "row" or self.has_split_sequence)
        if self.regathers:  # the whole sequence is not kept: the backward pass gathers it again
            inner = linear_with_grad_accumulation_and_async_allreduce(
                input=x,
                weight=self.linear_in.weights[0],
                bias=None,
                gradient_accumulation_fusion=False,
                allreduce_dgrad=False,
                sequence_parallel=True,
                tp_group=self.base.group,
            )
        else:
            if self.gathers_sequence:
                x = mappings.gather_from_sequence_parallel_region(x, group=self.base.group)
            elif self.copies_input:
                x = mappings.copy_to_tensor_model_parallel_region(x, group=self.base.group)
            inner = self.linear_in(x, splits)
        if self.base.ranks > 1:  # the inner product as a whole; its gradient differs by rank, and is summed
            if self.is_column:
                inner = mappings.all_gather_last_dim_from_tensor_parallel_region(inner, group=self.base.group)
            else:
                inner = mappings.reduce_from_tensor_model_parallel_region(inner, group=self.base.group)
                inner = mappings.copy_to_tensor_model_parallel_region(inner, group=self.base.group)
        y = self._after_out(self.linear_out(inner, splits))
        if not self.is_dropped_first:
            y = self.drop(y, is_split=self.is_column or self.has_split_sequence)
        scaled: torch.Tensor = y * self.scale
        return scaled

    def drop(self, x: torch.Tensor, *, is_split: bool) -> torch.Tensor:
        """Apply dropout: with a mask of its own on each rank that holds another part of x."""
        if not self.p or not self.training:
            return x
        if not is_split:
            return F.dropout(x, self.p)
        with get_cuda_rng_tracker().fork():
            return F.dropout(x, self.p)

    def _after_out(self, y: torch.Tensor) -> Any:
        base = self.base
        if base.ranks == 1 or (self.is_column and not base.gathers):
            return y
        if base.kind == "row" and base.is_reduced_outside:  # the sum over ranks puts the parts together
            before = base.rank * y.shape[-1]
            return F.pad(y, (before, (base.ranks - 1) * y.shape[-1] - before))
        if base.kind == "row" and self.has_split_sequence and self.exchanges:
            whole = mappings.all_to_all_hp2sp(y, group=base.group)
            return whole.reshape(y.shape[0] // base.ranks, *y.shape[1:-1], -1)
        y = mappings.gather_from_tensor_model_parallel_region(y, group=base.group)
        if base.kind == "row" and self.has_split_sequence:
            return mappings.scatter_to_sequence_parallel_region(y, group=base.group)
        return y

    def products(self) -> list[torch.Tensor]:
        """Return scale * B A for each of this rank's matrices. A collective of the ranks that share them."""
        base = self.base
        matrices = zip(self.linear_in.weights, self.linear_out.weights, strict=True)
        if self.is_column:
            return [self.scale * (b @ _joined(a, base)) for a, b in matrices]
        return [self.scale * (_joined(b, base) @ a) for a, b in matrices]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the sharded state, under Megatron-Bridge's names."""
        arguments = (sharded_offsets, metadata)
        found = self.linear_in.sharded_state_dict(f"{prefix}linear_in.", *arguments)
        found |= self.linear_out.sharded_state_dict(f"{prefix}linear_out.", *arguments)
        if (magnitude := self.weight_magnitude) is not None:
            key, axis, offsets = f"{prefix}weight_magnitude", 0 if self.is_column else None, tuple(sharded_offsets)
            gated = self.base.is_gated
            found[key] = sharded_parameter(self.base, magnitude, key, axis, offsets, is_gated=gated)
        return found


def _joined(part: torch.Tensor, base: BaseLayer) -> torch.Tensor:
    if base.ranks == 1:
        return part
    whole: torch.Tensor = mappings.gather_from_tensor_model_parallel_region(part.T.contiguous(), group=base.group)
    return whole.T


class SharedAdapter(Adapter):
    """One adapter for all grouped experts, on all ranks: they take their part of it.

    Its gradients are summed over tensor-parallel ranks, which have other tokens or another part of the product, as
    the gradients of norms are under sequence parallelism; experts need that.
    """

    def __init__(self, base: BaseLayer, peft: AdapterConfig, dim: int, seed: int) -> None:
        self.part = base
        whole = replace(
            base,
            kind="whole",
            num_experts=0,
            is_gated=False,
            marks={"allreduce": True, "sequence_parallel": True},
            in_size=base.in_size * (base.ranks if base.kind == "row" else 1),
            out_size=base.out_size * (base.ranks if base.kind == "column" else 1),
        )
        super().__init__(whole, peft, dim, seed)

    def forward(self, x: torch.Tensor, splits: Any = None) -> torch.Tensor:
        """Return the adapter's addend to the layer's output."""
        x = x.to(self.linear_in.weights[0].dtype)
        if self.is_dropped_first:
            x = self.drop(x, is_split=True)
        y = F.linear(F.linear(x, self._own_columns()), self._own_rows())
        if not self.is_dropped_first:
            y = self.drop(y, is_split=True)
        return y * self.scale

    def products(self) -> list[torch.Tensor]:
        """Return scale * B A for each of this rank's experts: the same."""
        return [self.scale * (self._own_rows() @ self._own_columns())] * self.part.num_experts

    def _own_columns(self) -> torch.Tensor:
        weight: torch.Tensor = self.linear_in.weights[0]
        return weight if self.part.kind != "row" else weight.chunk(self.part.ranks, 1)[self.part.rank]

    def _own_rows(self) -> torch.Tensor:
        weight: torch.Tensor = self.linear_out.weights[0]
        if self.part.kind != "column" or self.part.ranks == 1:
            return weight
        halves = weight.chunk(2) if self.part.is_gated else (weight,)
        return torch.cat([half.chunk(self.part.ranks)[self.part.rank] for half in halves])
