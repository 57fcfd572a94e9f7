"""Tuned user buffers of tensor parallelism as plain data: `training.comm_overlap.user_buffers` has them as classes."""

from typing import Any

_CONFIG = "cloudai_mbridge.training.comm_overlap.user_buffers"
# Precision, GPU, hidden size and sizes of the layout -> SMs of qkv_dgrad, qkv_wgrad, fc1_dgrad and fc1_wgrad, and of
# proj_fprop and fc2_fprop in chunks; without the last two these pass a ring, as the all-gathers do
_TUNED: dict[str, tuple[int, ...]] = {
    "bf16_h100_h8192_tp4_mbs1_seqlen8192": (4, 24, 2, 4, 24, 16),
    "fp8_h100_h8192_tp4_mbs1_seqlen8192": (4, 24, 2, 4),
    "bf16_b200_h8192_tp2_mbs1_seqlen8192": (16, 24, 2, 4, 32, 16),
    "fp8_b200_h8192_tp2_mbs1_seqlen8192": (4, 24, 2, 4),
    "bf16_h100_h16384_tp8_cp2_mbs1_seqlen8192": (2, 24, 2, 2, 24, 8),
    "fp8_h100_h16384_tp8_cp2_mbs1_seqlen8192": (2, 24, 2, 2),
    "bf16_b200_h16384_tp4_cp2_mbs1_seqlen8192": (8, 24, 2, 2, 32, 8),
    "fp8_b200_h16384_tp4_cp2_mbs1_seqlen8192": (8, 32, 2, 8),
}
TUNED = tuple(_TUNED)


def user_buffers(name: str) -> dict[str, Any]:
    """Return the settings of a name of `TUNED` in the form of a training config."""
    bulk, chunks = _TUNED[name][:4], _TUNED[name][4:]
    slots: dict[str, Any] = {slot: _ring() for slot in ("qkv_fprop", "proj_dgrad", "fc1_fprop", "fc2_dgrad")}
    for slot, num_sm in zip(("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"), bulk, strict=True):
        slots[slot] = {"_target_": f"{_CONFIG}.BulkOverlapCfg", "num_sm": num_sm, "cga_size": 2, "set_sm_margin": False}
    for i, slot in enumerate(("proj_fprop", "fc2_fprop")):
        slots[slot] = _pipeline(chunks[i]) if chunks else _ring(set_sm_margin=True)
    return {"_target_": f"{_CONFIG}.TransformerLayerTPOverlapCfg", **slots}


def _ring(**others: Any) -> dict[str, Any]:
    return {"_target_": f"{_CONFIG}.RingExchangeOverlapCfg", **others}


def _pipeline(num_sm: int) -> dict[str, Any]:
    sizes = {"num_sm": num_sm, "cga_size": 2, "num_splits": 4, "set_sm_margin": True}
    return {"_target_": f"{_CONFIG}.PipelineOverlapCfg", **sizes}
