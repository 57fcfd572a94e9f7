"""The section `peft`: adapted linear layers, and the kind of adapters. Names and defaults are Megatron-Bridge's."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Initialization = Literal["xavier", "normal", "kaiming", "zero"]

_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# A part of a fused layer -> the layer
CANONICAL = {
    **{f"linear_{part}": "linear_qkv" for part in "qkv"},
    **{f"linear_fc1_{part}": "linear_fc1" for part in ("up", "gate")},
}


@dataclass
class AdapterConfig:
    """Settings common to all kinds of adapters.

    target_modules: names of modules, or whole names with `*`; empty: all linear layers but `exclude_modules`.
    dim: the rank. alpha: the adapter's output is scaled by alpha / dim. dropout: before or after the adapter.
    """

    target_modules: list[str] | None = field(default_factory=lambda: list(_LINEAR))
    exclude_modules: list[str] = field(default_factory=list)
    dim: int = 32
    alpha: int = 32
    dropout: float = 0.0
    dropout_position: Literal["pre", "post"] = "pre"
    lora_A_init_method: Initialization = "xavier"  # noqa: N815
    lora_B_init_method: Initialization = "zero"  # noqa: N815
    # Written by Megatron-Bridge for its own objects
    canonical_mapping: dict[str, Any] = field(init=False, repr=False, default_factory=dict)
    params_to_save: list[str] = field(init=False, repr=False, default_factory=list)

    def finalize(self) -> None:
        """Check the values. Raises ValueError."""
        if self.dim < 1:
            raise ValueError(f"peft.dim = {self.dim} is not a rank; use at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"peft.dropout = {self.dropout}: use at least 0 and less than 1")
        if self.target_modules and self.exclude_modules:
            raise ValueError("peft.exclude_modules needs target_modules = [], which stands for all linear layers")


@dataclass
class LoRA(AdapterConfig):
    """Low-rank adaptation: a layer's output gets alpha / dim * B A x more.

    sequence_parallel_input_regather: in front of column-parallel layers, the whole sequence is not kept for the
    backward pass but gathered again. a2a_experimental: behind row-parallel layers, sequence parallelism exchanges all
    to all. normalize_moe_lora: experts get the rank dim / moe_router_topk. share_expert_adapters: grouped experts have
    one adapter together; False: one each.
    """

    sequence_parallel_input_regather: bool = False
    a2a_experimental: bool = False
    lora_dtype: torch.dtype | None = None
    normalize_moe_lora: bool = False
    share_expert_adapters: bool = True
    experts_shared_outer_loras: bool = False


@dataclass
class DoRA(AdapterConfig):
    """Weight-decomposed adaptation: LoRA for the direction of the weight's rows, and a magnitude for each."""

    alpha: int = 64

    def finalize(self) -> None:
        """Check the values. Raises ValueError."""
        super().finalize()
        if self.dropout_position != "pre":
            raise ValueError(f"peft.dropout_position = {self.dropout_position!r}: DoRA has its dropout before ('pre')")
        if self.dropout:
            raise ValueError(f"peft.dropout = {self.dropout}: DoRA is trained without; use 0.0")


@dataclass
class CanonicalLoRA(AdapterConfig):
    """LoRA with an adapter each for queries, keys and values, and for the gate and the up projection."""

    target_modules: list[str] | None = field(default_factory=lambda: [*CANONICAL, "linear_proj", "linear_fc2"])
    normalize_moe_lora: bool = False
    share_expert_adapters: bool = True

    def finalize(self) -> None:
        """Check the values. Raises ValueError."""
        super().finalize()
        for target in self.target_modules or ():
            for fused in ("linear_qkv", "linear_fc1"):
                if target.endswith(fused):
                    parts = ", ".join(part for part, layer in CANONICAL.items() if layer == fused)
                    raise ValueError(f"peft.target_modules: {target!r} is fused; CanonicalLoRA has {parts}")
