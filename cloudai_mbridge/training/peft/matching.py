"""Selection of the modules that get adapters: by name, or by whole name with `*`."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from cloudai_mbridge.training.peft.base_layer import is_linear
from cloudai_mbridge.training.peft.config import CANONICAL, AdapterConfig, CanonicalLoRA

_EXPERT = re.compile(r"\.mlp\.(?:.*\.)?experts\.(?:local_experts\.\d+\.)?linear_fc[12]$")


@dataclass(frozen=True)
class MatchedModule:
    """A module that gets an adapter.

    name: the full name, with global numbers of layers and experts. parts: the adapted parts of a fused layer.
    """

    parent: Any
    attribute: str
    name: str
    parts: frozenset[str]

    @property
    def module(self) -> Any:
        """The module itself."""
        return getattr(self.parent, self.attribute)

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to routed experts."""
        return _EXPERT.search(self.name) is not None


def find(chunk: Any, peft: AdapterConfig) -> list[MatchedModule]:
    """Return the modules of a chunk that get adapters. Raises ValueError: one of them cannot have one."""
    targets = _targets(peft)
    modules = dict(chunk.named_modules())
    found = []
    for local, module in modules.items():
        parent, _, attribute = local.rpartition(".")
        name = globalize(local, chunk)
        matched = _matched(targets, attribute, name) if targets else _is_left(peft, attribute, name, module)
        if local and matched is not None:
            if local == "output_layer":
                hint = "remove it from peft.target_modules" if targets else "add it to peft.exclude_modules"
                raise ValueError(f"peft: output_layer cannot have an adapter; {hint}")
            if not is_linear(module):
                raise ValueError(f"peft.target_modules: {name} is a {type(module).__name__}, not a linear layer")
            found.append(MatchedModule(modules[parent], attribute, name, matched))
    return found


def unmatched(peft: AdapterConfig, names: list[str]) -> list[str]:
    """Return the targets that match none of these module names."""
    patterns = {target: (_fused(target)[0] if _splits(peft) else target) for target in peft.target_modules or ()}
    return [
        target
        for target, pattern in patterns.items()
        if not any(_is_named(pattern, name.rpartition(".")[2], name) for name in names)
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


def _splits(peft: AdapterConfig) -> bool:
    return isinstance(peft, CanonicalLoRA)


def _targets(peft: AdapterConfig) -> dict[str, frozenset[str]]:
    """Map each pattern to the parts of a fused layer that it stands for."""
    targets: dict[str, frozenset[str]] = {}
    for target in peft.target_modules or ():
        pattern, part = _fused(target) if _splits(peft) else (target, "")
        targets[pattern] = targets.get(pattern, frozenset()) | ({part} if part else set())
    return targets


def _fused(target: str) -> tuple[str, str]:
    """Return the pattern of the fused layer that a part belongs to, and the part; "" for a layer of its own."""
    for part, layer in CANONICAL.items():
        if target.endswith(part):
            return target.removesuffix(part) + layer, part
    return target, ""


def _matched(targets: dict[str, frozenset[str]], attribute: str, name: str) -> frozenset[str] | None:
    return next((parts for pattern, parts in targets.items() if _is_named(pattern, attribute, name)), None)


def _is_left(peft: AdapterConfig, attribute: str, name: str, module: torch.nn.Module) -> frozenset[str] | None:
    is_out = any(_is_named(pattern, attribute, name) for pattern in peft.exclude_modules)
    parts = frozenset(part for part, layer in CANONICAL.items() if layer == attribute)
    return parts if is_linear(module, routers=False) and not is_out else None


def _is_named(pattern: str, attribute: str, name: str) -> bool:
    whole = ".*".join(re.escape(part) for part in pattern.split("*"))
    return attribute == pattern or re.fullmatch(whole, name) is not None


def has_layers_apart(peft: AdapterConfig) -> bool:
    """Return whether some layers may have adapters that others lack."""
    return any("*" in pattern for pattern in (*(peft.target_modules or ()), *peft.exclude_modules))
