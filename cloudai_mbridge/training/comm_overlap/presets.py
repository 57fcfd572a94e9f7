"""Tuned overlap settings: `userbuffers_<precision>_<GPU>_h<hidden size>_tp<n>[_cp<n>]_mbs<n>_seqlen<n>[_lora]`, with
the numbers of Megatron-Bridge's src/megatron/bridge/training/comm_overlap.py. `CommOverlapConfig` copies them."""

from dataclasses import replace

from cloudai_mbridge.training.comm_overlap.user_buffers import (
    BulkOverlapCfg,
    PipelineOverlapCfg,
    RingExchangeOverlapCfg,
    TPOverlapCfg,
    TransformerLayerTPOverlapCfg,
)


def _bulk(num_sm: int) -> BulkOverlapCfg:
    return BulkOverlapCfg(num_sm=num_sm, cga_size=2, set_sm_margin=False)


def _pipeline(num_sm: int, fp8_buf: bool = False) -> PipelineOverlapCfg:
    return PipelineOverlapCfg(num_sm=num_sm, cga_size=2, num_splits=4, set_sm_margin=True, fp8_buf=fp8_buf)


def _ring(cga_size: int = 1, fp8_buf: bool = False) -> RingExchangeOverlapCfg:
    return RingExchangeOverlapCfg(cga_size=cga_size, set_sm_margin=True, fp8_buf=fp8_buf)


def _layer(all_gather: RingExchangeOverlapCfg, **others: TPOverlapCfg | None) -> TransformerLayerTPOverlapCfg:
    slots = ("qkv_fprop", "proj_dgrad", "fc1_fprop", "fc2_dgrad")
    return TransformerLayerTPOverlapCfg(**{slot: replace(all_gather) for slot in slots}, **others)


def _preset(
    bulk: tuple[int, int, int, int], proj_fprop: TPOverlapCfg, fc2_fprop: TPOverlapCfg
) -> TransformerLayerTPOverlapCfg:
    """Return a pre-training preset: all-gathers by ring; `bulk`: SMs of qkv_dgrad, qkv_wgrad, fc1_dgrad, fc1_wgrad."""
    slots = ("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad")
    bulks = {slot: _bulk(num_sm) for slot, num_sm in zip(slots, bulk, strict=True)}
    return _layer(RingExchangeOverlapCfg(), **bulks, proj_fprop=proj_fprop, fc2_fprop=fc2_fprop)


def _lora(
    aggregate: bool, set_sm_margin: bool, proj_fprop: TPOverlapCfg, fc2_fprop: TPOverlapCfg
) -> TransformerLayerTPOverlapCfg:
    """Return a LoRA preset: frozen weights have no gradient, so both wgrad slots are empty."""
    return _layer(
        RingExchangeOverlapCfg(aggregate=aggregate, set_sm_margin=set_sm_margin),
        qkv_dgrad=_bulk(2),
        qkv_wgrad=None,
        fc1_dgrad=_pipeline(16, fp8_buf=True),
        fc1_wgrad=None,
        proj_fprop=proj_fprop,
        fc2_fprop=fc2_fprop,
    )


# Llama 3 70B
userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192 = _preset((4, 24, 2, 4), _pipeline(24), _pipeline(16))
userbuffers_fp8_h100_h8192_tp4_mbs1_seqlen8192 = _preset((4, 24, 2, 4), _ring(), _ring())
userbuffers_bf16_b200_h8192_tp2_mbs1_seqlen8192 = _preset((16, 24, 2, 4), _pipeline(32), _pipeline(16))
userbuffers_fp8_b200_h8192_tp2_mbs1_seqlen8192 = _preset((4, 24, 2, 4), _ring(), _ring())
userbuffers_fp8_h100_h8192_tp2_mbs1_seqlen4096_lora = _lora(False, True, _ring(2, True), _ring(2, True))

# Llama 3.1 405B
userbuffers_bf16_h100_h16384_tp8_cp2_mbs1_seqlen8192 = _preset((2, 24, 2, 2), _pipeline(24), _pipeline(8))
userbuffers_fp8_h100_h16384_tp8_cp2_mbs1_seqlen8192 = _preset((2, 24, 2, 2), _ring(), _ring())
userbuffers_bf16_b200_h16384_tp4_cp2_mbs1_seqlen8192 = _preset((8, 24, 2, 2), _pipeline(32), _pipeline(8))
userbuffers_fp8_b200_h16384_tp4_cp2_mbs1_seqlen8192 = _preset((8, 32, 2, 8), _ring(), _ring())
userbuffers_fp8_h100_h16384_tp4_mbs1_seqlen2048_lora = _lora(True, False, _pipeline(32, True), _pipeline(16, True))

# GPT-3 20B
userbuffers_bf16_h100_h6144_tp2_mbs2_seqlen2048 = _preset((8, 16, 4, 16), _pipeline(16), _pipeline(24))
userbuffers_fp8_h100_h6144_tp2_mbs2_seqlen2048 = _preset((8, 16, 4, 16), _pipeline(16, True), _pipeline(24, True))

# GPT-3 175B
userbuffers_bf16_h100_h12288_tp4_mbs1_seqlen2048 = _preset((4, 4, 2, 4), _pipeline(24), _ring())
userbuffers_fp8_h100_h12288_tp4_mbs1_seqlen2048 = _preset((4, 4, 2, 4), _ring(), _ring())
userbuffers_bf16_b200_h12288_tp4_mbs1_seqlen2048 = _preset((4, 16, 2, 8), _ring(), _ring())
userbuffers_fp8_b200_h12288_tp4_mbs1_seqlen2048 = _preset((4, 16, 2, 8), _ring(), _ring())

# Nemotron-4 15B
userbuffers_bf16_b200_h6144_tp2_mbs1_seqlen4096 = _preset((8, 32, 2, 8), _ring(), _ring())

# Nemotron-4 340B
userbuffers_bf16_b200_h18432_tp8_mbs1_seqlen4096 = _preset((8, 32, 2, 8), _ring(), _pipeline(24))
userbuffers_fp8_b200_h18432_tp8_mbs1_seqlen4096 = _preset((8, 32, 2, 8), _ring(), _ring())

__all__ = [name for name in globals() if name.startswith("userbuffers_")]
