"""Weight-decomposed adaptation: W' = m (W + B A) / |W + B A|, row by row (DoRA, https://arxiv.org/abs/2402.09353).

The norm counts as a constant in the backward pass, as the paper proposes. Of weights that are split along the input it
is that of the whole rows.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

from cloudai_mbridge.training.peft.adapter import Adapter, AdapterShape
from cloudai_mbridge.training.peft.base_layer import BaseLayer
from cloudai_mbridge.training.peft.linear import AdaptedLinear


class DecomposedAdapter(Adapter):
    """An adapter with a magnitude for each row of this rank's weight."""

    def __init__(self, base: BaseLayer, shape: AdapterShape, *, is_gated: bool = False) -> None:
        super().__init__(base, shape, is_gated=is_gated)
        self.is_gated = is_gated
        magnitude: Any = torch.nn.Parameter(torch.ones(base.out_size, dtype=shape.dtype, device=shape.device))
        magnitude.allreduce = base.marks["allreduce"]
        if base.kind == "column":
            magnitude.tensor_model_parallel, magnitude.partition_dim, magnitude.partition_stride = True, 0, 1
        else:  # with other tokens on each rank if the sequence is split
            magnitude.sequence_parallel = base.has_split_sequence
        self.weight_magnitude = magnitude

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the sharded state, under Megatron-Bridge's names."""
        key, offsets = f"{prefix}weight_magnitude", tuple(sharded_offsets)
        groups = {
            "tp_group": mpu.get_tensor_model_parallel_group(),
            "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        }
        arguments = {"prepend_offsets": offsets, **groups}
        if self.base.kind == "column":
            sharded = make_tp_sharded_tensor_for_checkpoint(self.weight_magnitude, key, 0, **arguments)
            sharded = apply_swiglu_sharded_factory(sharded, offsets) if self.is_gated else sharded
        else:
            sharded = make_sharded_tensor_for_checkpoint(self.weight_magnitude, key, **arguments)
        return {**super().sharded_state_dict(prefix, sharded_offsets, metadata), key: sharded}


class DecomposedLinear(AdaptedLinear):
    """A layer with such an adapter. The magnitudes begin as the norms of the rows."""

    def __init__(self, to_wrap: Any, adapter: DecomposedAdapter) -> None:
        super().__init__(to_wrap, adapter)
        with torch.no_grad():
            adapter.weight_magnitude.copy_(self._norms(super().merged()[0]))

    def forward(self, x: torch.Tensor, *args: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output, bias) as the wrapped layer does."""
        output, bias, seen = self.run_wrapped(x, *args, **keywords)
        added = self.added(seen, None).reshape(output.shape)
        inside = self.to_wrap.bias if bias is None else None  # the wrapped layer has added it
        if inside is None or not inside.numel():
            return self._ratio() * (output + added), bias
        return self._ratio() * (output - inside + added) + inside, bias

    def merged(self) -> list[torch.Tensor]:
        """Return this rank's matrix with the adapter, in fp32. A collective of the ranks that share it."""
        (matrix,) = super().merged()
        magnitude: Any = self.adapter.weight_magnitude
        return [matrix * (magnitude / self._norms(matrix))[:, None]]

    def _ratio(self) -> torch.Tensor:
        magnitude: Any = self.adapter.weight_magnitude
        with torch.no_grad():
            norms = self._norms(super().merged()[0])
        ratio: torch.Tensor = magnitude / norms.to(magnitude.dtype)
        return ratio

    def _norms(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the norms of the whole rows. A collective of the ranks that have parts of them."""
        base: Any = self.adapter.base
        squares = matrix.square().sum(1)
        if base.kind == "row" and base.ranks > 1:
            dist.all_reduce(squares, group=base.group)
        return squares.sqrt()
