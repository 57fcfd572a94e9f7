"""What overlaps where, from the parallel sizes; whatever the user set goes first."""

from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.training.compat.transformer_engine import have_te

# Elements per gradient bucket: large enough that its reduction is bound by bandwidth, not latency
_BUCKET_SIZE = 128 * 1024 * 1024


def tensor_parallel_obstacle(model: Any) -> str | None:
    """Say why products cannot overlap with tensor-parallel communication here, or None if they can."""
    if model.tensor_model_parallel_size < 2:
        return f"tensor_model_parallel_size is {model.tensor_model_parallel_size}; it takes 2 or more"
    if not model.sequence_parallel:
        return "sequence_parallel is off"
    if not have_te():
        return "Transformer Engine is not installed"
    return None


def resolve_model(user: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return the pipeline, embedding and expert overlap of the model config."""
    staged = model.pipeline_model_parallel_size > 1
    interleaved = staged and _num_chunks(model) > 1
    defaults = {
        # Interleaved stages exchange often, so their messages run beside the products; a plain 1F1B schedule sends and
        # receives in one batch
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": staged and not interleaved,
        "defer_embedding_wgrad_compute": False,
        "wgrad_deferral_limit": -1,
        "overlap_moe_expert_parallel_comm": False,
        "delay_wgrad_compute": False,
    }
    return _prefer(user, defaults)


def resolve_data_parallel(user: Mapping[str, Any], model: Any, data_parallel_size: int) -> dict[str, Any]:
    """Return the gradient and parameter overlap of the optimizer and DDP configs. Only for a distributed optimizer."""
    replicated = data_parallel_size > 1
    defaults = {
        "bucket_size": _BUCKET_SIZE if replicated else None,
        "overlap_grad_reduce": replicated,
        "overlap_param_gather": replicated,
        "overlap_param_gather_with_optimizer_step": False,
        "align_param_gather": replicated and model.pipeline_model_parallel_size > 1 and _num_chunks(model) > 1,
    }
    return _prefer(user, defaults)


def _num_chunks(model: Any) -> int:
    return model.virtual_pipeline_model_parallel_size or 1


def _prefer(user: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: default if user[name] is None else user[name] for name, default in defaults.items()}
