"""Rules of parallelism: sharded and replicated parameters, groups, the split of a sequence, the exchange of tokens."""

import math
import os
from typing import TYPE_CHECKING, Any

import torch

from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig
from cloudai_mbridge.training.config.text.summary import print_rank_0

if TYPE_CHECKING:
    from cloudai_mbridge.training.config.container import ConfigContainer


def apply_megatron_fsdp(config: "ConfigContainer") -> None:
    """Turn Megatron FSDP on in both places if either enables it, with its dependent settings, and check it.

    Options that it lacks are turned off, with a message on rank 0.
    """
    ddp, optimizer = config.ddp, config.optimizer
    if config.dist.use_megatron_fsdp and config.dist.use_torch_fsdp2:
        raise ValueError("dist.use_megatron_fsdp and dist.use_torch_fsdp2 exclude each other; set one of them")
    if not (config.dist.use_megatron_fsdp or ddp.use_megatron_fsdp):
        return
    config.dist.use_megatron_fsdp = ddp.use_megatron_fsdp = True
    if not (ddp.use_distributed_optimizer and optimizer.use_distributed_optimizer):
        print_rank_0("Megatron FSDP has a distributed optimizer: use_distributed_optimizer is set to True")
    ddp.use_distributed_optimizer = optimizer.use_distributed_optimizer = True
    if optimizer.use_precision_aware_optimizer and hasattr(ddp, "megatron_fsdp_use_decoupled_grad"):
        ddp.megatron_fsdp_use_decoupled_grad = True  # Transformer Engine's Adam reads gradients there
    if ddp.nccl_ub:
        ddp.fsdp_manual_registration = True
    checkpoint = config.checkpoint
    assert not config.dist.use_tp_pp_dp_mapping, "Megatron FSDP requires dist.use_tp_pp_dp_mapping=False"
    assert not _uses_checkpoints(config) or checkpoint.ckpt_format == "fsdp_dtensor", (
        f"Megatron FSDP requires checkpoint.ckpt_format='fsdp_dtensor', got {checkpoint.ckpt_format!r}"
    )
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1", (
        "Megatron FSDP requires CUDA_DEVICE_MAX_CONNECTIONS greater than 1 in the environment, or none"
    )
    assert ddp.nccl_ub or not getattr(ddp, "fsdp_manual_registration", False), (
        "ddp.fsdp_manual_registration requires ddp.nccl_ub=True"
    )
    interval = config.train.check_weight_hash_across_dp_replicas_interval
    assert interval is None or ddp.data_parallel_sharding_strategy != "optim_grads_params", (
        f"train.check_weight_hash_across_dp_replicas_interval={interval}: the parameters of"
        " ddp.data_parallel_sharding_strategy='optim_grads_params' have no replicas"
    )
    if ddp.average_in_collective and not ddp.disable_symmetric_registration:
        print_rank_0("ddp.average_in_collective does not work with NCCL's symmetric registration: set to False")
        ddp.average_in_collective = False
    if ddp.reuse_grad_buf_for_mxfp8_param_ag or optimizer.reuse_grad_buf_for_mxfp8_param_ag:
        print_rank_0("reuse_grad_buf_for_mxfp8_param_ag does not exist in Megatron FSDP: set to False")
        ddp.reuse_grad_buf_for_mxfp8_param_ag = optimizer.reuse_grad_buf_for_mxfp8_param_ag = False


def _uses_checkpoints(config: "ConfigContainer") -> bool:
    return config.checkpoint.save is not None or config.checkpoint.load is not None


def check_checkpoint_format(config: "ConfigContainer") -> None:
    """Check that Megatron FSDP's format is used with it alone, and that background saves and groups allow the format.

    Without Gloo's groups a distributed optimizer cannot be gathered.
    """
    checkpoint, kind = config.checkpoint, config.checkpoint.ckpt_format
    is_megatron_fsdp = config.ddp.use_megatron_fsdp and not config.dist.use_torch_fsdp2
    assert is_megatron_fsdp or kind != "fsdp_dtensor" or not _uses_checkpoints(config), (
        "checkpoint.ckpt_format='fsdp_dtensor' requires ddp.use_megatron_fsdp=True and dist.use_torch_fsdp2=False"
    )
    is_distributed = kind in ("torch_dist", "fsdp_dtensor")
    assert is_distributed or not checkpoint.async_save, (
        f"checkpoint.async_save requires checkpoint.ckpt_format='torch_dist' or 'fsdp_dtensor', got {kind!r}"
    )
    lacks_gloo = config.optimizer.use_distributed_optimizer and not config.dist.use_gloo_process_groups
    assert is_distributed or not lacks_gloo, (
        "dist.use_gloo_process_groups=False with a distributed optimizer requires "
        f"checkpoint.ckpt_format='torch_dist' or 'fsdp_dtensor', got {kind!r}"
    )


def check_fp8_weights(config: "ConfigContainer") -> None:
    """Check how weights in FP8 are gathered and sharded, and that the optimizer can update them.

    MXFP8 weights are gathered in the buffer of the gradients; Megatron FSDP has buffers of its own. It renews the
    transposes of other formats when it gathers weights: without, backward passes on Hopper multiply by those of an
    earlier step. Transformer Engine's Adam reads fp32 main parameters with delayed scaling, and finds the 16-bit
    remainders that it keeps with bf16 weights: "Master param tensor 0 has dtype=Int16", in the first step on an H200.

    AssertionError: the buffer. ValueError: a sharding strategy that leaves the weights whole, or the precision-aware
    optimizer, which leaves the main parameters to Adam, with remainders.
    """
    model, optimizer, ddp, precision = config.model, config.optimizer, config.ddp, config.mixed_precision
    if precision is not None and not isinstance(precision, str):
        gathers = precision.fp8_param_gather and precision.fp8_recipe == "mxfp8"
        is_sharded = config.dist.use_megatron_fsdp or ddp.use_megatron_fsdp
        assert not gathers or is_sharded or precision.reuse_grad_buf_for_mxfp8_param_ag, (
            'mixed_precision.fp8_param_gather=True with fp8_recipe="mxfp8" requires '
            "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=True"
        )
    if not getattr(model, "fp8", None) or not model.fp8_param:
        return
    has_remainders = optimizer.store_param_remainders and optimizer.main_params_dtype == torch.float32
    if model.fp8_recipe == "delayed" and optimizer.use_precision_aware_optimizer and has_remainders:
        raise ValueError(
            "optimizer.use_precision_aware_optimizer=True cannot update FP8 weights with delayed scaling; set it to"
            " False, or mixed_precision.fp8_param=False"
        )
    strategy = ddp.data_parallel_sharding_strategy
    if ddp.use_megatron_fsdp and model.fp8_recipe != "mxfp8" and strategy in ("optim", "optim_grads"):
        raise ValueError(
            f"ddp.data_parallel_sharding_strategy={strategy!r} computes wrong gradients with FP8 weights; use"
            " 'optim_grads_params', or mixed_precision.fp8_param=False"
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


def check_sequence_split(config: "ConfigContainer") -> None:
    """Check that the sequence splits evenly, and that no rank divides a fine-tuning loss by its own token count.

    Each rank takes one piece from either end of the sequence, so that causal attention costs all of them the same. In
    fine-tuning all tokens of a rank's pieces may be masked: a mean per rank would then be 0/0.

    AssertionError: context parallel size > 1 and one of the rules is broken.
    """
    model, cp = config.model, getattr(config.model, "context_parallel_size", 1)
    if cp <= 1:
        return
    assert model.seq_length % (2 * cp) == 0, (
        f"model.seq_length ({model.seq_length}) must be divisible by 2 x context_parallel_size ({cp})"
    )
    if isinstance(config.dataset, FinetuningDatasetConfig):
        assert model.calculate_per_token_loss, (
            f"fine-tuning with context_parallel_size {cp} requires model.calculate_per_token_loss=True"
        )
        assert not config.ddp.average_in_collective, (
            f"fine-tuning with context_parallel_size {cp} requires ddp.average_in_collective=False"
        )


def check_cp_comm_type(config: "ConfigContainer") -> None:
    """Check the kind of context-parallel communication against the layers and the hierarchical group sizes.

    AssertionError: a list that is not one entry per layer, a value of another type, the hierarchical kind without
        group sizes, or group sizes whose product is not the context parallel size.
    """
    model = config.model
    cp, comm_type = getattr(model, "context_parallel_size", 1), getattr(model, "cp_comm_type", None)
    kinds = comm_type if isinstance(comm_type, list) else [comm_type]
    if cp > 1 and isinstance(comm_type, list):
        assert len(kinds) == model.num_layers, (
            f"model.cp_comm_type has {len(kinds)} entries, but there are {model.num_layers} layers; give one per layer"
        )
    elif cp > 1:
        assert comm_type is None or isinstance(comm_type, str), (
            f"model.cp_comm_type must be a string or a list of strings, got {type(comm_type).__name__}"
        )
    sizes = getattr(model, "hierarchical_context_parallel_sizes", None)
    if any("a2a+p2p" in kind for kind in kinds if isinstance(kind, str)):
        # without the sizes the parts of a sequence would not communicate, and nothing would report it
        assert sizes is not None, (
            "model.cp_comm_type 'a2a+p2p' requires model.hierarchical_context_parallel_sizes, "
            "for example [8, 2] for a context_parallel_size of 16"
        )
    if sizes is not None:
        assert math.prod(sizes) == cp, (
            f"the product of model.hierarchical_context_parallel_sizes {sizes} is {math.prod(sizes)}, "
            f"but context_parallel_size is {cp}"
        )


def current_gpu() -> Any:
    """Return the properties of GPU 0, None without a GPU."""
    return torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None


# Backend of the flexible MoE token dispatcher -> major compute capabilities, names of other GPUs, human-readable
_FLEX_BACKENDS: dict[str, tuple[tuple[int, ...], tuple[str, ...], str]] = {
    "deepep": ((8, 9), ("NVIDIA B200", "NVIDIA B300"), "Ampere, Hopper, B200 and B300"),
    "hybridep": ((8, 9, 10), (), "Ampere, Hopper and Blackwell (compute capability 10)"),
}


def check_flex_dispatcher(config: "ConfigContainer") -> None:
    """Check that this GPU runs the dispatcher's backend; without one, the run may be meant for another machine."""
    device, backend = current_gpu(), getattr(config.model, "moe_flex_dispatcher_backend", None)
    is_flex = getattr(config.model, "moe_token_dispatcher_type", None) == "flex"
    if device is None or not is_flex or backend not in _FLEX_BACKENDS:
        return
    majors, names, supported = _FLEX_BACKENDS[backend]
    if device.major not in majors and not device.name.startswith(names):
        raise ValueError(
            f"model.moe_flex_dispatcher_backend={backend!r} runs on {supported} GPUs; this one is {device.name} "
            f"(compute capability {device.major}.{device.minor})"
        )
