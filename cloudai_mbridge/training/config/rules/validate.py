"""The rules that join the sections of a configuration, in the order in which they are applied.

A rule raises, or brings two sections into agreement; the model may be anything with Megatron-Core's field names.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

import torch

from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.compat.transformer_engine import te_is_at_least
from cloudai_mbridge.training.config.dataset import GPTDatasetConfig
from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig
from cloudai_mbridge.training.config.rules.context_parallel import check_cp_comm_type, check_sequence_split
from cloudai_mbridge.training.config.rules.cuda_graphs import check_full_iteration_graph, check_graphs
from cloudai_mbridge.training.config.rules.number_formats import (
    check_mxfp8_gather,
    check_optimizer_of_delayed_scaling,
    check_sharding_of_fp8_weights,
)
from cloudai_mbridge.training.config.rules.scheduler_steps import (
    calculate_scheduler_steps,
    check_epochs,
    check_training_scheduler_compatibility,
    forget_filled_in,
)
from cloudai_mbridge.training.config.rules.sharding import (
    apply_megatron_fsdp,
    check_fsdp_format,
    check_one_fsdp,
    drop_what_fsdp_lacks,
)
from cloudai_mbridge.training.config.rules.update import (
    _validate_and_sync_distributed_optimizer_settings,
    apply_deterministic_mode,
    finalize,
    let_the_loss_scale_find_overflow,
)

if TYPE_CHECKING:
    from cloudai_mbridge.training.config.container import ConfigContainer


def validate(config: "ConfigContainer") -> None:
    """Apply every rule of `CHECKS`; calling it again changes nothing more, and sees changes made in between."""
    forget_filled_in(config.scheduler)
    for check in CHECKS:
        check(config)


def mark_packed_sequences(config: "ConfigContainer") -> None:
    """Set the model's flag of packed batches, which it needs before it is finalized."""
    packed = bool(getattr(config.dataset, "pack_sequences_in_batch", False))
    if packed or hasattr(config.model, "_pack_sequences_in_batch"):
        config.model._pack_sequences_in_batch = packed


def finalize_sections(config: "ConfigContainer") -> None:
    """Finalize the sections one by one: each then raises its own errors."""
    for section in (config.dataset, config.ddp, config.optimizer, config.model):
        finalize(section)
    for section in (config.logger, config.train, config.scheduler, config.checkpoint):
        finalize(section)
    for section in (config.profiling, config.nvrx_straggler, config.tensor_inspect, config.peft):
        finalize(section)


def sync_te_rng_tracker(config: "ConfigContainer") -> None:
    """Use Transformer Engine's random-number tracker in both places if either enables it.

    Graphs need it too if the layers are Transformer Engine's, as in Megatron-LM: its attention takes no other
    ("Unsupported RNG states tracker").
    """
    model = config.model
    is_graphed = cuda_graphs.implementation(model) and model.transformer_impl == "transformer_engine"
    if config.rng.te_rng_tracker or getattr(model, "use_te_rng_tracker", False) or is_graphed:
        config.rng.te_rng_tracker = config.model.use_te_rng_tracker = True


def rerun_post_inits(config: "ConfigContainer") -> None:
    """Repeat the post-init of the sections that have no finalize, so that theirs too sees later changes."""
    for f in fields(config):
        section = getattr(config, f.name)
        if hasattr(section, "__post_init__") and not hasattr(section, "finalize"):
            section.__post_init__()


def ensure_data_parallel_size(config: "ConfigContainer") -> None:
    """Compute the data-parallel size if it is not set."""
    if getattr(config, "data_parallel_size", None) is None:
        config.set_data_parallel_size()


def _validate_mixed_precision_consistency(config: "ConfigContainer") -> None:
    """Check that model and optimizer each use one half precision, and the same one if the optimizer holds it.

    AssertionError: both half precisions, or a precision-aware optimizer whose precision is not the model's.
    """
    model, optimizer = config.model, config.optimizer
    for name, section in (("model", model), ("optimizer", optimizer)):
        assert not (section.bf16 and section.fp16), f"{name}: bf16 and fp16 are both True; set one of them"
    if not optimizer.use_precision_aware_optimizer:
        return
    for half in ("bf16", "fp16"):
        assert getattr(optimizer, half) or not getattr(model, half), (
            f"optimizer.use_precision_aware_optimizer with model.{half}=True requires optimizer.{half}=True"
        )
    assert model.bf16 or model.fp16 or not (optimizer.bf16 or optimizer.fp16), (
        "optimizer.use_precision_aware_optimizer with an fp32 model requires optimizer.bf16=False and fp16=False"
    )


def _validate_fine_grained_activation_offloading(config: "ConfigContainer") -> None:
    """Check the requirements of offloading activations of single modules.

    ValueError: layers that are not Transformer Engine's, or one of its releases that would offload weights as well.
    """
    model = config.model
    if not getattr(model, "fine_grained_activation_offloading", False):
        return
    if model.transformer_impl != "transformer_engine":
        raise ValueError(
            "model.fine_grained_activation_offloading requires model.transformer_impl='transformer_engine', "
            f"got {model.transformer_impl!r}"
        )
    if not te_is_at_least("2.10.0") or os.environ.get("NVTE_CPU_OFFLOAD_V1", "0") == "1":
        return
    raise ValueError(
        "model.fine_grained_activation_offloading with Transformer Engine >= 2.10.0 requires NVTE_CPU_OFFLOAD_V1=1 "
        "in the environment: without it weights are offloaded too"
    )


def clear_unused_graph_scope(config: "ConfigContainer") -> None:
    """Empty the scope of CUDA graphs that are off, so that nothing downstream takes it for a request."""
    if getattr(config.model, "cuda_graph_impl", None) == "none":
        cuda_graphs.capture_nothing(config.model)


def check_modelopt_fusion(config: "ConfigContainer") -> None:
    """Check that quantized layers do not accumulate gradients in a fused kernel."""
    if getattr(config.model, "restore_modelopt_state", False):
        assert not config.model.gradient_accumulation_fusion, (
            "model.restore_modelopt_state requires model.gradient_accumulation_fusion=False"
        )


def check_async_save_format(config: "ConfigContainer") -> None:
    """Check that checkpoints written in the background are in the format that can be."""
    kind = config.checkpoint.ckpt_format
    assert not config.checkpoint.async_save or kind in ("torch_dist", "fsdp_dtensor"), (
        f"checkpoint.async_save requires checkpoint.ckpt_format='torch_dist' or 'fsdp_dtensor', got {kind!r}"
    )


def default_tensor_inspect(config: "ConfigContainer") -> None:
    """Write the inspected tensors next to the checkpoints, counted from the step that is loaded."""
    inspect = config.tensor_inspect
    if inspect is None or not inspect.enabled:
        return
    if inspect.log_dir is None:
        inspect.log_dir = config.checkpoint.save or "."
    if inspect.init_training_step == 0 and config.checkpoint.ckpt_step is not None:
        inspect.init_training_step = int(config.checkpoint.ckpt_step)


def sync_cpu_initialization(config: "ConfigContainer") -> None:
    """Initialise weights on the CPU when process groups come later: a GPU's generator needs them."""
    config.model.use_cpu_initialization = (
        getattr(config.model, "use_cpu_initialization", False) or config.dist.lazy_mpu_init
    )


def check_decentralized_groups(config: "ConfigContainer") -> None:
    """Check that decentralized process groups go without Gloo's, and without levels of context parallelism.

    AssertionError, NotImplementedError: they do not.
    """
    sizes = getattr(config.model, "hierarchical_context_parallel_sizes", None)
    if config.dist.use_decentralized_pg and sizes is not None:
        raise NotImplementedError(
            f"dist.use_decentralized_pg has no groups for model.hierarchical_context_parallel_sizes = {sizes}; use None"
        )
    assert not (config.dist.use_decentralized_pg and config.dist.use_gloo_process_groups), (
        "dist.use_decentralized_pg has NCCL groups only; set dist.use_gloo_process_groups=False"
    )


def check_gloo_free_format(config: "ConfigContainer") -> None:
    """Check that a distributed optimizer is not gathered over Gloo groups that do not exist."""
    if config.dist.use_gloo_process_groups or not config.optimizer.use_distributed_optimizer:
        return
    assert config.checkpoint.ckpt_format in ("torch_dist", "fsdp_dtensor"), (
        "dist.use_gloo_process_groups=False with a distributed optimizer requires "
        f"checkpoint.ckpt_format='torch_dist' or 'fsdp_dtensor', got {config.checkpoint.ckpt_format!r}"
    )


def check_gather_with_step(config: "ConfigContainer") -> None:
    """Check that there is a second chunk to update while the first one's parameters are gathered.

    ValueError: no virtual pipeline stages, or no distributed optimizer.
    """
    if not config.optimizer.overlap_param_gather_with_optimizer_step:
        return
    chunks = getattr(config.model, "virtual_pipeline_model_parallel_size", None) or 1
    if chunks < 2 or not config.optimizer.use_distributed_optimizer:
        raise ValueError(
            "optimizer.overlap_param_gather_with_optimizer_step = True needs virtual pipeline stages"
            f" (model.virtual_pipeline_model_parallel_size, got {chunks}) and"
            " optimizer.use_distributed_optimizer = True; set it to False"
        )


def check_packed_micro_batch(config: "ConfigContainer") -> None:
    """Check that a pack, which already is a batch, comes alone in its micro-batch."""
    if not isinstance(config.dataset, FinetuningDatasetConfig):
        return
    specs, train = config.dataset.packed_sequence_specs, config.train
    mbs, gbs = train.micro_batch_size, train.global_batch_size
    if specs is None or specs.packed_sequence_size <= 0 or mbs is None or mbs <= 1:
        return
    raise ValueError(
        f"packed sequences require train.micro_batch_size=1, got {mbs}. The same work is: train.micro_batch_size=1, "
        f"train.global_batch_size={(gbs or 0) // mbs} (now {gbs}), "
        f"packed_sequence_size={specs.packed_sequence_size * mbs} (now {specs.packed_sequence_size})"
    )


def check_in_batch_packing(config: "ConfigContainer") -> None:
    """Check that there is more than one sequence to pack in a micro-batch."""
    if getattr(config.dataset, "pack_sequences_in_batch", False) and config.train.micro_batch_size == 1:
        raise ValueError("dataset.pack_sequences_in_batch requires train.micro_batch_size greater than 1")


def check_peft_checkpoint(config: "ConfigContainer") -> None:
    """Check that an adapter has weights to adapt."""
    assert config.peft is None or config.checkpoint.pretrained_checkpoint is not None, (
        "peft requires checkpoint.pretrained_checkpoint"
    )


def check_sequence_lengths(config: "ConfigContainer") -> None:
    """Check that the data is as long as the model expects; a dataset of the user's own may have no length."""
    if isinstance(config.dataset, GPTDatasetConfig | FinetuningDatasetConfig):
        assert config.model.seq_length == config.dataset.seq_length, (
            f"model.seq_length ({config.model.seq_length}) must equal dataset.seq_length ({config.dataset.seq_length})"
        )


class DeviceInfo(NamedTuple):
    """A GPU's name and compute capability."""

    name: str
    major: int
    minor: int


def current_device_info() -> DeviceInfo | None:
    """Return the properties of GPU 0, None without a GPU."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(0)
    return DeviceInfo(device.name, device.major, device.minor)


# Backend of the flexible MoE token dispatcher -> major compute capabilities, names of other GPUs, human-readable
_FLEX_BACKENDS: dict[str, tuple[tuple[int, ...], tuple[str, ...], str]] = {
    "deepep": ((8, 9), ("NVIDIA B200", "NVIDIA B300"), "Ampere, Hopper, B200 and B300"),
    "hybridep": ((8, 9, 10), (), "Ampere, Hopper and Blackwell (compute capability 10)"),
}


def check_flex_dispatcher(config: "ConfigContainer") -> None:
    """Check that this GPU runs the dispatcher's backend; without one, the run may be meant for another machine."""
    device, backend = current_device_info(), getattr(config.model, "moe_flex_dispatcher_backend", None)
    is_flex = getattr(config.model, "moe_token_dispatcher_type", None) == "flex"
    if device is None or not is_flex or backend not in _FLEX_BACKENDS:
        return
    majors, names, supported = _FLEX_BACKENDS[backend]
    if device.major not in majors and not device.name.startswith(names):
        raise ValueError(
            f"model.moe_flex_dispatcher_backend={backend!r} runs on {supported} GPUs; this one is {device.name} "
            f"(compute capability {device.major}.{device.minor})"
        )


def move_deprecated_validation_fields(config: "ConfigContainer") -> None:
    """Move fields set under their old names in `train` to `validation`.

    Moved, not copied: a copy would overwrite, on the next call, a value set under the new name since.
    """
    for name in ("eval_iters", "eval_interval", "skip_train"):
        value = getattr(config.train, name, None)
        if value is None:
            continue
        warnings.warn(f"train.{name} is deprecated; set validation.{name}", DeprecationWarning, stacklevel=2)
        setattr(config.validation, name, value)
        setattr(config.train, name, None)


CHECKS: tuple[Callable[["ConfigContainer"], None], ...] = (
    check_epochs,
    mark_packed_sequences,
    finalize_sections,
    sync_te_rng_tracker,
    rerun_post_inits,
    ensure_data_parallel_size,
    apply_deterministic_mode,
    _validate_and_sync_distributed_optimizer_settings,
    _validate_mixed_precision_consistency,
    let_the_loss_scale_find_overflow,
    _validate_fine_grained_activation_offloading,
    check_full_iteration_graph,
    check_graphs,
    clear_unused_graph_scope,
    check_one_fsdp,
    apply_megatron_fsdp,
    drop_what_fsdp_lacks,
    check_mxfp8_gather,
    check_optimizer_of_delayed_scaling,
    check_sharding_of_fp8_weights,
    check_modelopt_fusion,
    check_fsdp_format,
    check_async_save_format,
    default_tensor_inspect,
    sync_cpu_initialization,
    check_decentralized_groups,
    check_gloo_free_format,
    check_gather_with_step,
    check_training_scheduler_compatibility,
    calculate_scheduler_steps,
    check_sequence_split,
    check_cp_comm_type,
    check_packed_micro_batch,
    check_in_batch_packing,
    check_peft_checkpoint,
    check_sequence_lengths,
    check_flex_dispatcher,
    move_deprecated_validation_fields,
)
