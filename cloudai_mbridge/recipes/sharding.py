"""Settings that accompany Megatron-FSDP and offloaded layers, as in upstream's launcher.

Source: Megatron-Bridge 0.6.0, scripts/performance/utils/overrides.py.
"""

from typing import Any

_CHECKPOINT = "fsdp_dtensor"  # the only format that Megatron-FSDP saves and loads


def shard_parameters(data: dict[str, Any], *, has_checkpoints: bool) -> None:
    """Shard parameters, gradients and the optimizer's state over the data-parallel ranks.

    has_checkpoints: the training saves or loads some.
    """
    ddp = data["ddp"]
    if not ddp.get("use_megatron_fsdp"):
        ddp.pop("use_megatron_fsdp", None)
        return
    ddp |= {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    ddp |= {"keep_fp8_transpose_cache": False, "average_in_collective": False}
    data["optimizer"]["use_distributed_optimizer"] = True
    data["model"]["init_model_with_meta_device"] = True
    if data.get("comm_overlap", {}).get("defer_embedding_wgrad_compute"):
        data["comm_overlap"]["defer_embedding_wgrad_compute"] = False
    if has_checkpoints:
        data["checkpoint"].setdefault("ckpt_format", _CHECKPOINT)


def offload_layers(model: dict[str, Any]) -> None:
    """Keep the activations of the first layers in the host's memory."""
    if model.get("cpu_offloading_num_layers"):
        model |= {"cpu_offloading": True, "cpu_offloading_weights": False}
    else:
        model.pop("cpu_offloading_num_layers", None)
