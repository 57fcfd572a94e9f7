"""Adapters: their linear layers and their size, as in the section `peft` of a training config; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from cloudai_mbridge.errors import BadInput

LORA, DORA, CANONICAL = "LoRA", "DoRA", "CanonicalLoRA"
_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_PARTS = {"linear_qkv": ("linear_q", "linear_k", "linear_v"), "linear_fc1": ("linear_fc1_up", "linear_fc1_gate")}
_CANONICAL_TARGETS = (*_PARTS["linear_qkv"], *_PARTS["linear_fc1"], "linear_proj", "linear_fc2")


@dataclass(frozen=True)
class Adapters:
    """The kind, and fields of `training.peft.config`. target_modules: (): all linear layers but `exclude_modules`."""

    kind: str = LORA
    target_modules: tuple[str, ...] = _TARGETS
    exclude_modules: tuple[str, ...] = ()
    dim: int = 32
    normalize_moe_lora: bool = False
    share_expert_adapters: bool = True
    sequence_parallel_input_regather: bool = False

    def __post_init__(self) -> None:
        """Raise BadInput if the adapters are not modelled."""
        if self.kind not in (LORA, DORA, CANONICAL):
            raise BadInput(
                f"peft: adapters of the kind {self.kind!r} are not modelled; use LoRA, DoRA or CanonicalLoRA"
            )
        if not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 1:
            raise BadInput(f"peft.dim = {self.dim!r} is not a rank; use at least 1")
        for name in ("normalize_moe_lora", "share_expert_adapters", "sequence_parallel_input_regather"):
            if not isinstance(getattr(self, name), bool):
                raise BadInput(f"peft.{name} = {getattr(self, name)!r} is not true or false; correct it")
        for name in (*self.target_modules, *self.exclude_modules):
            if "*" in name or "." in name:
                raise BadInput(f"peft: adapters of single layers ({name!r}) are not modelled; name modules alone")

    def parts_of(self, linear: str, parts: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the parts of a linear layer that have an adapter each: a layer in one piece itself; () for none.

        parts: names of the parts of a fused layer, which only `CanonicalLoRA` adapts one by one.
        """
        if not self.target_modules:
            is_left = linear not in self.exclude_modules and linear != "router"
            return () if not is_left else parts if self.kind == CANONICAL and parts else (linear,)
        if self.kind == CANONICAL and parts:
            return tuple(part for part in parts if part in self.target_modules)
        if self.kind == CANONICAL and any(part in self.target_modules for part in _PARTS.get(linear, ())):
            return (linear,)  # in one piece, whichever of its parts is named
        return (linear,) if linear in self.target_modules else ()


# Fields that `extra_cmd_args` may set
FIELDS = frozenset(field.name for field in fields(Adapters)) - {"kind"}


def adapters_of(section: Mapping[str, Any], base: Adapters | None = None) -> Adapters:
    """Return the adapters of a section `peft`, or `base` with its changes. BadInput: they are not modelled."""
    kind = str(section["_target_"]).rpartition(".")[2] if "_target_" in section else base.kind if base else LORA
    if base is None:
        base = Adapters(kind, _CANONICAL_TARGETS if kind == CANONICAL else _TARGETS)
    given = {name: value for name, value in section.items() if name in FIELDS}
    for name in ("target_modules", "exclude_modules"):
        if (value := given.get(name, ())) is not None and not isinstance(value, (list, tuple)):
            raise BadInput(f"peft.{name} = {value!r} is not a list; write it as ['linear_qkv']")
        given |= {name: tuple(map(str, value or ()))} if name in given else {}
    return replace(base, kind=kind, **given)
