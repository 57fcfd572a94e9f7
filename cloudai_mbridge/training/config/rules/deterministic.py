"""Deterministic mode: what it forbids, and torch's switch for it."""

import os
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.enums import AttnBackend

if TYPE_CHECKING:
    from cloudai_mbridge.training.config.container import ConfigContainer

NCCL_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def apply_deterministic_mode(config: "ConfigContainer") -> None:
    """Check that nothing in use is non-deterministic, then make torch refuse whatever else is.

    `NCCL_ALGO` is a rule of the configuration, so it is checked without a GPU too.

    Raises:
        AssertionError: flash attention, fused cross entropy, or NCCL free to choose its algorithm.
    """
    model = config.model
    if not getattr(model, "deterministic_mode", False):
        return
    assert getattr(model, "attention_backend", None) != AttnBackend.flash, (
        "deterministic_mode: flash attention is not deterministic; choose another model.attention_backend"
    )
    assert not getattr(model, "cross_entropy_loss_fusion", False), (
        "deterministic_mode: fused cross entropy is not deterministic; set model.cross_entropy_loss_fusion=False"
    )
    algorithm = os.environ.get("NCCL_ALGO")
    assert algorithm in NCCL_ALGORITHMS, (
        f"deterministic_mode: the environment's NCCL_ALGO must be one of {', '.join(NCCL_ALGORITHMS)}, "
        f"got {algorithm!r}"
    )
    torch.use_deterministic_algorithms(True)
