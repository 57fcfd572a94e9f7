"""Linear layers that get adapters: their selection by name, and how they are split over ranks."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter

from cloudai_mbridge.training.compat.transformer_engine import have_te
from cloudai_mbridge.training.peft.config import CANONICAL, AdapterConfig, CanonicalLoRA

Kind = Literal["column", "row", "whole"]

_EXPERT = re.compile(r"\.mlp\.(?:.*\.)?experts\.(?:local_experts\.\d+\.)?linear_fc[12]$")  # of routed experts


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

    name: with global numbers of layers and experts; determines the adapter's initial values. config: Megatron-Core's.
    kind: which side of the weight is split over `group`; "whole": none. in_size, out_size: of this rank's weight.
    num_experts: of grouped experts on this rank, 0 for another layer. is_reduced_outside: the layer around it gathers
    the input and reduces the output. gathers: the output is gathered over all ranks. is_gated: the rows of the gate and
    the up projection are split separately. marks: attributes of the weight that decide how gradients are reduced.
    """

    name: str
    config: Any
    kind: Kind
    group: Any
    in_size: int
    out_size: int
    num_experts: int
    is_expert: bool
    is_reduced_outside: bool
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


def describe(module: Any, name: str) -> BaseLayer:
    """Describe a linear layer. The process groups must be up."""
    kind: Kind = next((kind for kind, classes in _classes().items() if isinstance(module, classes)), "whole")
    weight = weights(module)[0]
    is_expert = _EXPERT.search(name) is not None
    own = getattr(module, "parallel_mode", "") is None or getattr(module, "explicit_expert_comm", False)
    return BaseLayer(
        name=name,
        config=module.config,
        kind=kind,
        group=mpu.get_expert_tensor_parallel_group() if is_expert else mpu.get_tensor_model_parallel_group(),
        in_size=weight.shape[-1],
        out_size=weight.shape[-2],
        num_experts=getattr(module, "num_gemms", 0),
        is_expert=is_expert,
        is_reduced_outside=kind != "whole" and (is_expert or own),
        gathers=bool(getattr(module, "gather_output", False)),
        is_gated=name.endswith("linear_fc1") and module.config.gated_linear_unit,
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


def find(chunk: Any, peft: AdapterConfig) -> list[tuple[Any, str, str, frozenset[str]]]:
    """Return (parent, attribute, name, adapted parts of a fused layer) of the modules of a chunk that get adapters.

    Names have global numbers of layers and experts. Raises ValueError: a module cannot have an adapter.
    """
    targets: dict[str, frozenset[str]] = {}  # pattern -> the parts of a fused layer that it stands for
    for target in peft.target_modules or ():
        pattern, part = _fused(target, peft)
        targets[pattern] = targets.get(pattern, frozenset()) | ({part} if part else set())
    modules = dict(chunk.named_modules())
    found = []
    for local, module in modules.items():
        parent, _, attribute = local.rpartition(".")
        name = globalize(local, chunk)
        if targets:
            matched = next((parts for pattern, parts in targets.items() if _is_named(pattern, attribute, name)), None)
        else:
            is_out = any(_is_named(pattern, attribute, name) for pattern in peft.exclude_modules)
            parts = frozenset(part for part, layer in CANONICAL.items() if layer == attribute)
            matched = parts if is_linear(module, routers=False) and not is_out else None
        if local and matched is not None:
            if local == "output_layer":
                hint = "remove it from peft.target_modules" if targets else "add it to peft.exclude_modules"
                raise ValueError(f"peft: output_layer cannot have an adapter; {hint}")
            if not is_linear(module):
                raise ValueError(f"peft.target_modules: {name} is a {type(module).__name__}, not a linear layer")
            found.append((modules[parent], attribute, name, matched))
    return found


def unmatched(peft: AdapterConfig, names: list[str]) -> list[str]:
    """Return the targets that match none of these module names."""
    return [
        target
        for target in peft.target_modules or ()
        if not any(_is_named(_fused(target, peft)[0], name.rpartition(".")[2], name) for name in names)
    ]


def globalize(name: str, chunk: Any) -> str:
    """Return a module's name with the global numbers of its layer and of its expert."""
    if layer := re.match(r"decoder\.layers\.(\d+)\b", name):
        number = chunk.decoder.layers[int(layer[1])].layer_number - 1
        name = name.replace(layer[0], f"decoder.layers.{number}", 1)
    if expert := re.search(r"\blocal_experts\.(\d+)\b", name):
        per_rank = chunk.config.num_moe_experts // chunk.config.expert_model_parallel_size
        number = mpu.get_expert_model_parallel_rank() * per_rank + int(expert[1])
        name = name.replace(expert[0], f"local_experts.{number}", 1)
    return name


def _fused(target: str, peft: AdapterConfig) -> tuple[str, str]:
    """Return the pattern of the fused layer that a part belongs to, and the part; "" for a layer of its own."""
    for part, layer in CANONICAL.items() if isinstance(peft, CanonicalLoRA) else ():
        if target.endswith(part):
            return target.removesuffix(part) + layer, part
    return target, ""


def _is_named(pattern: str, attribute: str, name: str) -> bool:
    whole = ".*".join(re.escape(part) for part in pattern.split("*"))
    return attribute == pattern or re.fullmatch(whole, name) is not None


def has_layers_apart(peft: AdapterConfig) -> bool:
    """Return whether some layers may have adapters that others lack."""
    return any("*" in pattern for pattern in (*(peft.target_modules or ()), *peft.exclude_modules))
