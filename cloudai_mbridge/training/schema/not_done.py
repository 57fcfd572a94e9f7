"""Features that a valid configuration may request and this loop lacks. Standard library only: planning reads it too."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from cloudai_mbridge.training.compat.versions import GPU, TRANSFORMER_ENGINE

_MISSING = object()

_UNREAD = "Megatron-Bridge 0.6 does not read it"
_NO_GROUPS = "Megatron-Bridge 0.6 makes no process groups for generalized tensor parallelism"
# section.field -> the reason, and the harmless values; a section that is None is harmless, too
ASKS_FOR_NOTHING: dict[str, tuple[str, tuple[Any, ...]]] = {
    "validation.test_mode": (_UNREAD, (False,)),
    "validation.multiple_validation_sets": (_UNREAD, (False,)),
    "validation.validation_set_names": (_UNREAD, (None,)),
    "train.step_batch_size_schedule": (_UNREAD, (None,)),
    "train.gpu_sniff_test_interval": (_UNREAD, (None,)),
    "checkpoint.save_params_interval": (_UNREAD, (None,)),
    "checkpoint.save_activations_interval": (_UNREAD, (None,)),
    "checkpoint.save_tokens_per_expert_interval": (_UNREAD, (None,)),
    "checkpoint.async_ckpt_use_cpu_shm": (_UNREAD, (False,)),
    "checkpoint.save_wgrads_interval": (_UNREAD, (None,)),
    "checkpoint.save_dgrads_interval": (_UNREAD, (None,)),
    "checkpoint.use_checkpoint_args": (_UNREAD, (False,)),
    "checkpoint.use_mp_args_from_checkpoint_args": (_UNREAD, (False,)),
    "checkpoint.ckpt_convert_format": (_UNREAD, (None,)),
    "logger.log_device_memory_used": (_UNREAD, (False,)),
    "logger.moe_routing_trace_path": (_UNREAD, (None,)),
    "dist.lazy_mpu_init": ("Megatron-Bridge 0.6 makes no groups then, so that it cannot train", (False,)),
    "dist.eval_context_parallel_size": ("Megatron-Bridge 0.6 leaves its groups to a script of the user", (None,)),
    "model.gtp_weight_remat_size": (_NO_GROUPS, (1,)),
    "model.expert_gtp_weight_remat_size": (_NO_GROUPS, (1,)),
    "model.tensor_parallel_num_weight_shards": (_NO_GROUPS, (None, 1)),
    "model.expert_tensor_parallel_num_weight_shards": (_NO_GROUPS, (None, 1)),
    "model.hybrid_context_parallel": ("Megatron-Bridge 0.6 does not make the batches of its schedule", (False,)),
    "model.dynamic_context_parallel": ("no release of Megatron-Core has it", (False,)),
}
# section.field -> the requirement on the machine, and the values without requirement
NEEDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "model.fp8": (TRANSFORMER_ENGINE, (None,)),
    "model.experimental_attention_variant": (TRANSFORMER_ENGINE, (None,)),
    "model.moe_latent_size": (TRANSFORMER_ENGINE, (None,)),
    "model.fp4": (TRANSFORMER_ENGINE, (None,)),
    "model.use_arbitrary_attention_mask": (TRANSFORMER_ENGINE, (None, False)),
    "mixed_precision.fp8": (TRANSFORMER_ENGINE, (None,)),
    "mixed_precision.fp4": (TRANSFORMER_ENGINE, (None,)),
    "rng.te_rng_tracker": (TRANSFORMER_ENGINE, (False,)),
    "rng.inference_rng_tracker": (GPU, (False,)),
    "model.cuda_graph_impl": (GPU, ("none",)),
    "model.cpu_offloading_num_layers": (TRANSFORMER_ENGINE, (0,)),
    "model.enable_cuda_graph": (GPU, (False,)),
    "model.external_cuda_graph": (TRANSFORMER_ENGINE, (False,)),
    "optimizer.optimizer_cuda_graph": (TRANSFORMER_ENGINE, (False,)),
    "model.tp_comm_overlap": (TRANSFORMER_ENGINE, (False,)),
    "comm_overlap.tp_comm_overlap": (TRANSFORMER_ENGINE, (False,)),
    "model.use_transformer_engine_op_fuser": (TRANSFORMER_ENGINE, (False,)),
    "model.use_transformer_engine_full_layer_spec": (TRANSFORMER_ENGINE, (False,)),
    "model.moe_expert_rank_capacity_factor": (TRANSFORMER_ENGINE, (None,)),
    "model.moe_paged_stash": (TRANSFORMER_ENGINE, (False,)),
    "ddp.nccl_ub": (GPU, (False,)),
    "model.cpu_offloading": (TRANSFORMER_ENGINE, (False,)),
    "model.fine_grained_activation_offloading": (TRANSFORMER_ENGINE, (False,)),
    "dist.external_gpu_device_mapping": (GPU, (False,)),
    "dist.flight_recorder_dump_path": (GPU, (None,)),
    "model.hierarchical_context_parallel_sizes": (TRANSFORMER_ENGINE, (None,)),
    "tensor_inspect.enabled": (TRANSFORMER_ENGINE, (False,)),  # called by its layers only
    "dist.use_sharp": (GPU, (False,)),
    "dist.nccl_communicator_config_path": (GPU, (None,)),
    "dist.high_priority_stream_groups": (GPU, (None, [])),
}
# Layers of a hybrid's pattern that need it too: Mamba, Gated DeltaNet, sparse and latent attention
_NEEDING = "MGD+"
# section.field -> the other field of the section, and the value of it with which the first has no effect
WITHOUT_EFFECT: dict[str, tuple[str, Any]] = {"model.cuda_graph_modules": ("cuda_graph_impl", "none")}


def asked_for(get: Callable[[str, str, Any], Any]) -> Iterator[str]:
    """Yield a message for every field that requests an unsupported feature.

    get: (section, field, default) -> the field's value, or the default if the section or field is missing.
    """
    for path, row in ASKS_FOR_NOTHING.items():
        section, _, name = path.partition(".")
        value = get(section, name, _MISSING)
        if value is not _MISSING and value not in row[1]:
            yield f"{path} = {value!r} ({remedy(row)})"
    # Measured with Megatron-Core 0.19.2: two ranks with `muon` leave the curve of one by 4e-3 in the third step, since
    # each updates whole weights from the gradients of its shard; layer-wise, the optimizer is not built
    name = get("optimizer", "optimizer", "adam")
    for section in ("optimizer", "ddp") if name not in ("adam", "sgd") else ():
        if get(section, "use_distributed_optimizer", False):
            yield (
                f"{section}.use_distributed_optimizer = True with optimizer.optimizer = {name!r}"
                " (use False; Megatron-Core reduces each gradient to one rank and steps it on all)"
            )
    if get("dist", "use_decentralized_pg", False):  # Megatron-Bridge would silently ignore most of these
        combined = " with dist.use_decentralized_pg = True"
        if get("dist", "use_gloo_process_groups", True):
            yield f"dist.use_gloo_process_groups = True{combined} (use False)"
        yield from other_than(_NOT_IN_A_GRID, get, combined)


# section.field -> the value that is harmless with decentralized groups
_NOT_IN_A_GRID: dict[str, Any] = {
    "dist.use_tp_pp_dp_mapping": False,
    "dist.use_sharp": False,
    "dist.nccl_communicator_config_path": None,
    "dist.high_priority_stream_groups": None,
    "model.pipeline_model_parallel_comm_backend": None,
    "model.hierarchical_context_parallel_sizes": None,
    "ddp.num_distributed_optimizer_instances": 1,
}


def other_than(fields: Mapping[str, Any], get: Callable[[str, str, Any], Any], combined: str = "") -> Iterator[str]:
    """Yield a message for every field with another value than the harmless one that `fields` has. get: as above."""
    for path, harmless in fields.items():
        section, _, name = path.partition(".")
        value = get(section, name, harmless)
        if value != harmless and (value or harmless):
            yield f"{path} = {value!r}{combined} (use {harmless!r})"


def remedy(row: tuple[str, tuple[Any, ...]]) -> str:
    """Return the harmless values to use instead, and the reason."""
    reason, harmless = row
    return f"use {' or '.join(map(repr, harmless))}; {reason}"


def needed(get: Callable[[str, str, Any], Any], lacking: Collection[str]) -> Iterator[str]:
    """Yield a message for every field that needs a feature the machine lacks. get: as in `asked_for`."""
    tp = get("model", "tensor_model_parallel_size", 1) or 1
    is_one_rank = tp < 2 or not get("model", "sequence_parallel", False)
    for path, (what, harmless) in NEEDS.items():
        section, _, name = path.partition(".")
        value = get(section, name, _MISSING) if what in lacking else _MISSING
        if value is not _MISSING and value not in harmless and not (path == _IN_GROUPS and is_one_rank):
            yield f"{path} = {value!r} needs {what} (use {' or '.join(map(repr, harmless))})"
    modules = get("model", "recompute_modules", None) if TRANSFORMER_ENGINE in lacking else None
    is_selective = get("model", "recompute_granularity", None) == "selective"
    if is_selective and (wrong := [name for name in RECOMPUTED_BY_ENGINE if name in (modules or ())]):
        yield f"model.recompute_modules = {modules!r} needs {TRANSFORMER_ENGINE} (remove {' and '.join(wrong)})"
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern") if TRANSFORMER_ENGINE in lacking else ():
        if layers := [each for each in _NEEDING if each in (get("model", name, None) or "")]:
            yield f"model.{name} with {', '.join(layers)} needs {TRANSFORMER_ENGINE} (use the layers *, - and E)"


# Modules that Megatron-Core recomputes by functions of Transformer Engine, or in its layers alone
RECOMPUTED_BY_ENGINE = ("layernorm", "moe_act")
# Switched off, with a warning, without anything to overlap with
_IN_GROUPS = "comm_overlap.tp_comm_overlap"
