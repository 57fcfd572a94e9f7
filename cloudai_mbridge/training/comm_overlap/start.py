"""Transformer Engine's user buffers: created after the process groups, dropped before them."""

from pathlib import Path
from typing import Any

from cloudai_mbridge.training.compat.transformer_engine import te_is_at_least
from cloudai_mbridge.training.config.text.yaml_text import read_yaml
from cloudai_mbridge.training.errors import ConfigError


def start_user_buffers(model: Any, micro_batch_size: int) -> None:
    """Make the buffers in which tensor-parallel communication overlaps with products. A collective.

    Nothing without `model.tp_comm_overlap`. Buffers of an earlier run in this process are dropped.

    ConfigError: `model.tp_comm_overlap_cfg` names a file that cannot be read.
    """
    if not model.tp_comm_overlap:
        return
    from transformer_engine import pytorch as te

    tokens = model.seq_length * micro_batch_size // model.context_parallel_size
    settings = layer_settings(model.tp_comm_overlap_cfg)
    te.destroy_ub()
    te.initialize_ub(
        shape=[tokens, model.hidden_size],
        tp_size=model.tensor_model_parallel_size,
        dtype=model.params_dtype,
        ub_cfgs=settings,
        bootstrap_backend=model.tp_comm_bootstrap_backend,
        **_formats(te, model),
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


def _formats(te: Any, model: Any) -> dict[str, Any]:
    """Return the argument that selects the buffers' number formats of activations."""
    if not te_is_at_least("2.8.0"):
        return {"use_fp8": model.fp8 is not None}
    kinds = te.UserBufferQuantizationMode
    has_layers_in_bf16 = model.first_last_layers_bf16 and (
        model.num_layers_at_start_in_bf16 > 0 or model.num_layers_at_end_in_bf16 > 0
    )
    modes = [kinds.FP8] if model.fp8 else [kinds.NONE]
    return {"quantization_modes": [*modes, kinds.NONE] if model.fp8 and has_layers_in_bf16 else modes}
