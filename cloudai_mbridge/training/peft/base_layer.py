"""How a linear layer is split over ranks, which its adapter follows: Megatron-Core's own and Transformer Engine's."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter

from cloudai_mbridge.training.compat.transformer_engine import have_te

Kind = Literal["column", "row", "whole"]


@cache
def _classes() -> dict[Kind, tuple[type, ...]]:
    """Return the classes of each kind; a class may be derived from one of "whole"."""
    column: list[type] = [ColumnParallelLinear]
    row: list[type] = [RowParallelLinear]
    whole: list[type] = []
    if have_te():
        from megatron.core.extensions import transformer_engine as te

        column += [te.TEColumnParallelLinear, te.TELayerNormColumnParallelLinear, te.TEColumnParallelGroupedLinear]
        row += [te.TERowParallelLinear, te.TERowParallelGroupedLinear]
        whole += [te.TELinear]
    return {"column": tuple(column), "row": tuple(row), "whole": tuple(whole)}


def is_linear(module: torch.nn.Module, *, routers: bool = True) -> bool:
    """Return whether a module can have an adapter."""
    kinds = sum(_classes().values(), ())
    return isinstance(module, (*kinds, TopKRouter) if routers else kinds)


@dataclass(frozen=True)
class BaseLayer:
    """Properties of a layer that its adapter needs.

    kind: which side of the weight is split over `group`; "whole": none. in_size, out_size: of this rank's weight.
    num_experts: of grouped experts on this rank, 0 for another layer. is_reduced_outside: the layer around it gathers
    the input and reduces the output. gathers: the output is gathered over all ranks. is_gated: the rows of the gate and
    the up projection are split separately. marks: attributes of the weight that decide how gradients are reduced.
    """

    kind: Kind
    group: Any
    in_size: int
    out_size: int
    num_experts: int
    is_expert: bool
    is_reduced_outside: bool
    has_split_sequence: bool
    gathers: bool
    is_gated: bool
    marks: dict[str, bool]

    @property
    def ranks(self) -> int:
        """Over how many ranks the weight is split."""
        return 1 if self.kind == "whole" else int(self.group.size())

    @property
    def rank(self) -> int:
        """The place among them."""
        return 0 if self.kind == "whole" else int(self.group.rank())

    @property
    def whole_in_size(self) -> int:
        """The input's size on all ranks together."""
        return self.in_size * (self.ranks if self.kind == "row" else 1)


def describe(module: Any, name: str, *, is_expert: bool) -> BaseLayer:
    """Describe a linear layer; is_expert: of routed experts. The process groups must be up."""
    kind: Kind = next((kind for kind, classes in _classes().items() if isinstance(module, classes)), "whole")
    weight = weights(module)[0]
    config = module.config
    is_fc1 = name.endswith("linear_fc1")
    own = getattr(module, "parallel_mode", "") is None or getattr(module, "explicit_expert_comm", False)
    return BaseLayer(
        kind=kind,
        group=mpu.get_expert_tensor_parallel_group() if is_expert else mpu.get_tensor_model_parallel_group(),
        in_size=weight.shape[-1],
        out_size=weight.shape[-2],
        num_experts=getattr(module, "num_gemms", 0),
        is_expert=is_expert,
        is_reduced_outside=kind != "whole" and (is_expert or own),
        has_split_sequence=config.sequence_parallel,
        gathers=bool(getattr(module, "gather_output", False)),
        is_gated=is_fc1 and config.gated_linear_unit,
        marks={
            "allreduce": getattr(weight, "allreduce", True),
            "sequence_parallel": kind == "whole" and bool(getattr(weight, "sequence_parallel", False)),
        },
    )


def weights(module: Any) -> list[Any]:
    """Return the matrices of a layer; more than one of grouped experts."""
    if hasattr(module, "weight0"):
        return [getattr(module, f"weight{i}") for i in range(module.num_gemms)]
    return [module.weight]
