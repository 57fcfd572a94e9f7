"""Overlap of each linear layer's products with tensor-parallel communication in Transformer Engine's user buffers.

A slot's name is layer and pass: `fc1_dgrad` is the input gradient of the first MLP matrix.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cloudai_mbridge.training.compat.transformer_engine import te_is_at_least
from cloudai_mbridge.training.config.text.yaml_text import read_yaml
from cloudai_mbridge.training.errors import ConfigError


@dataclass
class TPOverlapCfg:
    """Overlap of one linear layer in one pass; see the three kinds below."""


@dataclass
class PipelineOverlapCfg(TPOverlapCfg):
    """Split the product into `num_splits` chunks and send each while the next is computed.

    num_sm: streaming multiprocessors (SMs) that communicate; cga_size: thread blocks per cluster of theirs;
    set_sm_margin: leave these SMs out of the product's grid; fp8_buf: communicate in FP8.
    """

    num_sm: int
    cga_size: int
    num_splits: int
    set_sm_margin: bool
    fp8_buf: bool = False
    atomic_gemm: bool = False
    method: str = "pipeline"


@dataclass
class RingExchangeOverlapCfg(TPOverlapCfg):
    """Pass chunks around the ring of ranks while the chunk at hand is multiplied.

    aggregate: take the chunks in pairs. Other fields as in `PipelineOverlapCfg`.
    """

    aggregate: bool = False
    method: str = "ring_exchange"
    num_sm: int = 1
    cga_size: int = 1
    set_sm_margin: bool = False
    fp8_buf: bool = False
    atomic_gemm: bool = False


@dataclass
class BulkOverlapCfg(TPOverlapCfg):
    """Overlap a whole collective with a product that does not depend on it. Fields as in `PipelineOverlapCfg`."""

    num_sm: int
    cga_size: int
    set_sm_margin: bool
    method: str = "bulk"


@dataclass
class TransformerLayerTPOverlapCfg:
    """Overlap of the four matrices of a transformer layer. None leaves a slot to Transformer Engine."""

    qkv_dgrad: TPOverlapCfg | None
    qkv_wgrad: TPOverlapCfg | None
    fc1_dgrad: TPOverlapCfg | None
    fc1_wgrad: TPOverlapCfg | None
    qkv_fprop: TPOverlapCfg | None
    proj_dgrad: TPOverlapCfg | None
    fc1_fprop: TPOverlapCfg | None
    fc2_dgrad: TPOverlapCfg | None
    proj_fprop: TPOverlapCfg | None
    fc2_fprop: TPOverlapCfg | None


def as_te_dict(layer: TransformerLayerTPOverlapCfg) -> dict[str, dict[str, Any]]:
    """Return slot -> settings. Slots that are None are absent: for Transformer Engine a key is a choice."""
    return {slot: settings for slot, settings in asdict(layer).items() if settings is not None}


def start_user_buffers(model: Any, micro_batch_size: int) -> None:
    """Make the buffers in which tensor-parallel communication overlaps with products. A collective.

    Nothing without `model.tp_comm_overlap`. Buffers of an earlier run in this process are dropped.

    ConfigError: `model.tp_comm_overlap_cfg` names a file that cannot be read.
    """
    if not model.tp_comm_overlap:
        return
    from transformer_engine import pytorch as te

    if not te_is_at_least("2.8.0"):
        formats: dict[str, Any] = {"use_fp8": model.fp8 is not None}
    else:
        kinds = te.UserBufferQuantizationMode
        has_layers_in_bf16 = model.first_last_layers_bf16 and (
            model.num_layers_at_start_in_bf16 > 0 or model.num_layers_at_end_in_bf16 > 0
        )
        modes = [kinds.FP8, *([kinds.NONE] if has_layers_in_bf16 else [])] if model.fp8 else [kinds.NONE]
        formats = {"quantization_modes": modes}
    tokens = model.seq_length * micro_batch_size // model.context_parallel_size
    settings = layer_settings(model.tp_comm_overlap_cfg)
    te.destroy_ub()
    te.initialize_ub(
        shape=[tokens, model.hidden_size],
        tp_size=model.tensor_model_parallel_size,
        dtype=model.params_dtype,
        ub_cfgs=settings,
        bootstrap_backend=model.tp_comm_bootstrap_backend,
        **formats,
    )


def stop_user_buffers(model: Any) -> None:
    """Drop the buffers. Every rank calls it, while the groups are up."""
    if model.tp_comm_overlap:
        from transformer_engine import pytorch as te

        te.destroy_ub()


def layer_settings(given: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return the settings of each layer and pass; {} leaves them to Transformer Engine. given: them, or a YAML file.

    ConfigError: the file cannot be read, or holds no table.
    """
    if not isinstance(given, str):
        return given or {}
    try:
        settings = read_yaml(Path(given))
    except (OSError, ConfigError) as error:
        raise ConfigError(f"model.tp_comm_overlap_cfg = {given!r}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"model.tp_comm_overlap_cfg = {given!r}: no table of layers, such as qkv_fprop, is in it")
    return settings


def _bulk(num_sm: int) -> BulkOverlapCfg:
    return BulkOverlapCfg(num_sm=num_sm, cga_size=2, set_sm_margin=False)


def _pipeline(num_sm: int, fp8_buf: bool = False) -> PipelineOverlapCfg:
    return PipelineOverlapCfg(num_sm=num_sm, cga_size=2, num_splits=4, set_sm_margin=True, fp8_buf=fp8_buf)


def _ring(cga_size: int = 1, fp8_buf: bool = False) -> RingExchangeOverlapCfg:
    return RingExchangeOverlapCfg(cga_size=cga_size, set_sm_margin=True, fp8_buf=fp8_buf)


def _preset(
    all_gather: RingExchangeOverlapCfg, proj_fprop: TPOverlapCfg, fc2_fprop: TPOverlapCfg, **others: TPOverlapCfg | None
) -> TransformerLayerTPOverlapCfg:
    slots = ("qkv_fprop", "proj_dgrad", "fc1_fprop", "fc2_dgrad")
    gathered = {slot: replace(all_gather) for slot in slots}
    return TransformerLayerTPOverlapCfg(**gathered, proj_fprop=proj_fprop, fc2_fprop=fc2_fprop, **others)


def _pretraining(
    bulk: tuple[int, int, int, int], proj_fprop: TPOverlapCfg, fc2_fprop: TPOverlapCfg
) -> TransformerLayerTPOverlapCfg:
    """bulk: SMs of qkv_dgrad, qkv_wgrad, fc1_dgrad, fc1_wgrad."""
    slots = ("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad")
    bulks = {slot: _bulk(num_sm) for slot, num_sm in zip(slots, bulk, strict=True)}
    return _preset(RingExchangeOverlapCfg(), proj_fprop, fc2_fprop, **bulks)


def _lora(
    all_gather: RingExchangeOverlapCfg, proj_fprop: TPOverlapCfg, fc2_fprop: TPOverlapCfg
) -> TransformerLayerTPOverlapCfg:
    """Frozen weights have no gradient, so both wgrad slots are empty."""
    dgrads = {"qkv_dgrad": _bulk(2), "fc1_dgrad": _pipeline(16, fp8_buf=True)}
    return _preset(all_gather, proj_fprop, fc2_fprop, **dgrads, qkv_wgrad=None, fc1_wgrad=None)


# `userbuffers_<precision>_<GPU>_h<hidden size>_tp<n>[_cp<n>]_mbs<n>_seqlen<n>[_lora]`: tuned settings, the numbers of
# Megatron-Bridge's src/megatron/bridge/training/comm_overlap.py. `CommOverlapConfig` copies them.

# Llama 3 70B
userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192 = _pretraining((4, 24, 2, 4), _pipeline(24), _pipeline(16))
userbuffers_fp8_h100_h8192_tp4_mbs1_seqlen8192 = _pretraining((4, 24, 2, 4), _ring(), _ring())
userbuffers_bf16_b200_h8192_tp2_mbs1_seqlen8192 = _pretraining((16, 24, 2, 4), _pipeline(32), _pipeline(16))
userbuffers_fp8_b200_h8192_tp2_mbs1_seqlen8192 = _pretraining((4, 24, 2, 4), _ring(), _ring())
userbuffers_fp8_h100_h8192_tp2_mbs1_seqlen4096_lora = _lora(_ring(), _ring(2, True), _ring(2, True))

# Llama 3.1 405B
userbuffers_bf16_h100_h16384_tp8_cp2_mbs1_seqlen8192 = _pretraining((2, 24, 2, 2), _pipeline(24), _pipeline(8))
userbuffers_fp8_h100_h16384_tp8_cp2_mbs1_seqlen8192 = _pretraining((2, 24, 2, 2), _ring(), _ring())
userbuffers_bf16_b200_h16384_tp4_cp2_mbs1_seqlen8192 = _pretraining((8, 24, 2, 2), _pipeline(32), _pipeline(8))
userbuffers_fp8_b200_h16384_tp4_cp2_mbs1_seqlen8192 = _pretraining((8, 32, 2, 8), _ring(), _ring())
userbuffers_fp8_h100_h16384_tp4_mbs1_seqlen2048_lora = _lora(
    RingExchangeOverlapCfg(aggregate=True), _pipeline(32, True), _pipeline(16, True)
)

# GPT-3 20B
userbuffers_bf16_h100_h6144_tp2_mbs2_seqlen2048 = _pretraining((8, 16, 4, 16), _pipeline(16), _pipeline(24))
userbuffers_fp8_h100_h6144_tp2_mbs2_seqlen2048 = _pretraining((8, 16, 4, 16), _pipeline(16, True), _pipeline(24, True))

# GPT-3 175B
userbuffers_bf16_h100_h12288_tp4_mbs1_seqlen2048 = _pretraining((4, 4, 2, 4), _pipeline(24), _ring())
userbuffers_fp8_h100_h12288_tp4_mbs1_seqlen2048 = _pretraining((4, 4, 2, 4), _ring(), _ring())
userbuffers_bf16_b200_h12288_tp4_mbs1_seqlen2048 = _pretraining((4, 16, 2, 8), _ring(), _ring())
userbuffers_fp8_b200_h12288_tp4_mbs1_seqlen2048 = _pretraining((4, 16, 2, 8), _ring(), _ring())

# Nemotron-4 15B
userbuffers_bf16_b200_h6144_tp2_mbs1_seqlen4096 = _pretraining((8, 32, 2, 8), _ring(), _ring())

# Nemotron-4 340B
userbuffers_bf16_b200_h18432_tp8_mbs1_seqlen4096 = _pretraining((8, 32, 2, 8), _ring(), _pipeline(24))
userbuffers_fp8_b200_h18432_tp8_mbs1_seqlen4096 = _pretraining((8, 32, 2, 8), _ring(), _ring())

__all__ = [
    "BulkOverlapCfg",
    "PipelineOverlapCfg",
    "RingExchangeOverlapCfg",
    "TPOverlapCfg",
    "TransformerLayerTPOverlapCfg",
]
__all__ += [name for name in globals() if name.startswith("userbuffers_")]
