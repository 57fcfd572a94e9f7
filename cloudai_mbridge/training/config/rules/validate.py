"""The rules that join the sections of a configuration, in the order in which they are applied, and its final state.

A rule raises, or brings two sections into agreement; the model may be anything with Megatron-Core's field names.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.enums import AttnBackend

from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.compat.transformer_engine import te_is_at_least
from cloudai_mbridge.training.config.dataset import GPTDatasetConfig
from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig
from cloudai_mbridge.training.config.rules import parallel, scheduler_steps
from cloudai_mbridge.training.config.rules.cuda_graphs import check_graphs
from cloudai_mbridge.training.config.text.summary import print_rank_0, warn_rank_0
from cloudai_mbridge.training.mixed_precision import get_mixed_precision_config
from cloudai_mbridge.training.startup.variables import set_variables

if TYPE_CHECKING:
    from cloudai_mbridge.training.config.container import ConfigContainer

NCCL_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def runtime_config_update(cfg: "ConfigContainer") -> None:
    """Apply variables, precision, data-parallel size and communication overlap, then validate; in this order.

    Overlap depends on the data-parallel size and overrides the precision's settings; the rules see the result of both.

    AssertionError, ValueError: as `ConfigContainer.validate`, or an unknown precision recipe.
    """
    set_variables(cfg.env_vars)
    if cfg.mixed_precision is not None:
        precision = get_mixed_precision_config(cfg.mixed_precision)
        cfg.mixed_precision = precision
        precision.finalize()
        precision.setup(cfg.model, cfg.optimizer, cfg.ddp)
    cfg.set_data_parallel_size()
    if cfg.comm_overlap is not None:
        cfg.comm_overlap.finalize()
        cfg.comm_overlap.setup(cfg.model, cfg.optimizer, cfg.ddp)
    cfg.validate()


def mimo_runtime_config_update(cfg: "ConfigContainer") -> None:
    """Finalize the sections that do not depend on the model, for a model of several modules, each with its own layout.

    The loop sees a data-parallel size of 1. Precision, overlap and the model itself are left to the code that
    builds the modules.
    """
    set_variables(cfg.env_vars)
    cfg.data_parallel_size = 1
    _finalize(cfg, "optimizer", "ddp", "logger", "train", "scheduler", "checkpoint")
    _validate_and_sync_distributed_optimizer_settings(cfg)
    apply_deterministic_mode(cfg)


def _finalize(config: "ConfigContainer", *names: str) -> None:
    """Finalize the sections of these names one by one: each then raises its own errors."""
    for name in names:
        if hasattr(section := getattr(config, name), "finalize"):
            section.finalize()


def validate(config: "ConfigContainer") -> None:
    """Apply every rule of `CHECKS`; calling it again changes nothing more, and sees changes made in between."""
    scheduler_steps.forget_filled_in(config.scheduler)
    for check in CHECKS:
        check(config)


def finalize_sections(config: "ConfigContainer") -> None:
    """Finalize the sections, or repeat the post-init of those without a method for it: they see later changes.

    The model needs the flag of packed batches before; the data-parallel size is computed if it is not set.
    """
    packed = bool(getattr(config.dataset, "pack_sequences_in_batch", False))
    if packed or hasattr(config.model, "_pack_sequences_in_batch"):
        config.model._pack_sequences_in_batch = packed
    _finalize(config, "dataset", "ddp", "optimizer", "model", "logger", "train", "scheduler", "checkpoint")
    _finalize(config, "profiling", "nvrx_straggler", "tensor_inspect", "peft")
    for section in (getattr(config, each.name) for each in fields(config)):
        if hasattr(section, "__post_init__") and not hasattr(section, "finalize"):
            section.__post_init__()
    if getattr(config, "data_parallel_size", None) is None:
        config.set_data_parallel_size()


def sync_te_rng_tracker(config: "ConfigContainer") -> None:
    """Use Transformer Engine's random-number tracker in both places if either enables it.

    Graphs need it too if the layers are Transformer Engine's, as in Megatron-LM: its attention takes no other
    ("Unsupported RNG states tracker").
    """
    model = config.model
    is_graphed = cuda_graphs.implementation(model) and model.transformer_impl == "transformer_engine"
    if config.rng.te_rng_tracker or getattr(model, "use_te_rng_tracker", False) or is_graphed:
        config.rng.te_rng_tracker = config.model.use_te_rng_tracker = True


def apply_deterministic_mode(config: "ConfigContainer") -> None:
    """Check that nothing in use is non-deterministic, then make torch refuse any other such operation.

    `NCCL_ALGO` is a rule of the configuration, so it is checked without a GPU too.

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


def _validate_and_sync_distributed_optimizer_settings(config: "ConfigContainer") -> None:
    """Turn on in both sections the settings of either: the distributed optimizer, overlapped parameter gather.

    Rank 0 warns if they differed.
    """
    for name in ("use_distributed_optimizer", "overlap_param_gather"):
        ddp, optimizer = getattr(config.ddp, name, False), getattr(config.optimizer, name, False)
        if ddp != optimizer:
            if name == "use_distributed_optimizer" or optimizer:  # overlap is usually set in ddp alone
                warn_rank_0(f"ddp.{name}={ddp} and optimizer.{name}={optimizer}: both are set to True")
            setattr(config.ddp, name, True)
            setattr(config.optimizer, name, True)


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


def let_the_loss_scale_find_overflow(config: "ConfigContainer") -> None:
    """Switch the NaN checks off under a dynamic loss scale, which finds its value by gradients that overflow."""
    checks = ((config.ddp, "check_for_nan_in_grad"), (config.rerun_state_machine, "check_for_nan_in_loss"))
    if not config.optimizer.fp16 or config.optimizer.loss_scale is not None:
        return
    if on := [name for section, name in checks if getattr(section, name)]:
        print_rank_0(f"{' and '.join(on)} switched off: fp16 with a dynamic loss scale skips steps that overflow")
    for section, name in checks:
        setattr(section, name, False)


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


def check_modelopt_fusion(config: "ConfigContainer") -> None:
    """Check that quantized layers do not accumulate gradients in a fused kernel."""
    if getattr(config.model, "restore_modelopt_state", False):
        assert not config.model.gradient_accumulation_fusion, (
            "model.restore_modelopt_state requires model.gradient_accumulation_fusion=False"
        )


def fill_in_defaults(config: "ConfigContainer") -> None:
    """Initialise weights on the CPU if process groups come later, since a GPU's generator needs them.

    Inspected tensors are written next to the checkpoints, counted from the step that is loaded.
    """
    model, inspect = config.model, config.tensor_inspect
    model.use_cpu_initialization = getattr(model, "use_cpu_initialization", False) or config.dist.lazy_mpu_init
    if inspect is None or not inspect.enabled:
        return
    if inspect.log_dir is None:
        inspect.log_dir = config.checkpoint.save or "."
    if inspect.init_training_step == 0 and config.checkpoint.ckpt_step is not None:
        inspect.init_training_step = int(config.checkpoint.ckpt_step)


def check_data(config: "ConfigContainer") -> None:
    """Check that samples are as long as the model expects, and that a pack, which is a batch, comes alone.

    A dataset of the user's own may have no length.

    AssertionError: the lengths. ValueError: the sizes of packed batches.
    """
    model, dataset, train = config.model, config.dataset, config.train
    mbs, gbs = train.micro_batch_size, train.global_batch_size
    if getattr(dataset, "pack_sequences_in_batch", False) and mbs == 1:
        raise ValueError("dataset.pack_sequences_in_batch requires train.micro_batch_size greater than 1")
    specs = getattr(dataset, "packed_sequence_specs", None) or getattr(dataset, "offline_packing_specs", None)
    size = getattr(specs, "packed_sequence_size", None) or 0
    if size > 0 and mbs is not None and mbs > 1:
        raise ValueError(
            f"packed sequences require train.micro_batch_size=1, got {mbs}. The same work is: "
            f"train.micro_batch_size=1, train.global_batch_size={(gbs or 0) // mbs} (now {gbs}), "
            f"packed_sequence_size={size * mbs} (now {size})"
        )
    kwargs = getattr(dataset, "dataset_kwargs", None) or {}
    is_padded = getattr(dataset, "pad_to_max_length", False) is True or kwargs.get("pad_to_max_length") is True
    if size > 0 and getattr(specs, "pad_cu_seqlens", False) and not is_padded:
        raise ValueError(
            "dataset.packed_sequence_specs.pad_cu_seqlens=True requires dataset.dataset_kwargs.pad_to_max_length=True"
        )
    if isinstance(dataset, GPTDatasetConfig | FinetuningDatasetConfig):
        assert model.seq_length == dataset.seq_length, (
            f"model.seq_length ({model.seq_length}) must equal dataset.seq_length ({dataset.seq_length})"
        )


def check_peft_checkpoint(config: "ConfigContainer") -> None:
    """Check that an adapter has weights to adapt."""
    assert config.peft is None or config.checkpoint.pretrained_checkpoint is not None, (
        "peft requires checkpoint.pretrained_checkpoint"
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
    scheduler_steps.check_epochs,
    finalize_sections,
    sync_te_rng_tracker,
    apply_deterministic_mode,
    _validate_and_sync_distributed_optimizer_settings,
    _validate_mixed_precision_consistency,
    let_the_loss_scale_find_overflow,
    _validate_fine_grained_activation_offloading,
    check_graphs,
    parallel.apply_megatron_fsdp,
    parallel.check_fp8_weights,
    check_modelopt_fusion,
    parallel.check_checkpoint_format,
    fill_in_defaults,
    parallel.check_decentralized_groups,
    parallel.check_gather_with_step,
    scheduler_steps.check_training_scheduler_compatibility,
    scheduler_steps.calculate_scheduler_steps,
    parallel.check_sequence_split,
    parallel.check_cp_comm_type,
    check_data,
    check_peft_checkpoint,
    parallel.check_flex_dispatcher,
    move_deprecated_validation_fields,
)
