"""Rules on weights in FP8: how they are gathered and sharded, and which optimizer reads them."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cloudai_mbridge.training.config.container import ConfigContainer


def check_mxfp8_gather(config: "ConfigContainer") -> None:
    """Check that MXFP8 weights are gathered in the buffer of the gradients; Megatron FSDP has buffers of its own."""
    precision = config.mixed_precision
    if config.dist.use_megatron_fsdp or config.ddp.use_megatron_fsdp or precision is None or isinstance(precision, str):
        return
    gathers = precision.fp8_param_gather and precision.fp8_recipe == "mxfp8"
    assert not gathers or precision.reuse_grad_buf_for_mxfp8_param_ag, (
        'mixed_precision.fp8_param_gather=True with fp8_recipe="mxfp8" requires '
        "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=True"
    )


def check_optimizer_of_delayed_scaling(config: "ConfigContainer") -> None:
    """Check that Transformer Engine's Adam can update FP8 weights with delayed scaling.

    Its kernel for them reads fp32 main parameters, and finds the 16-bit remainders that it keeps with bf16 weights:
    "Master param tensor 0 has dtype=Int16", in the first step on an H200.

    ValueError: the precision-aware optimizer, which leaves the main parameters to it, with remainders.
    """
    model, optimizer = config.model, config.optimizer
    is_delayed = getattr(model, "fp8", None) and model.fp8_recipe == "delayed" and model.fp8_param
    has_remainders = optimizer.store_param_remainders and optimizer.main_params_dtype == torch.float32
    if is_delayed and optimizer.use_precision_aware_optimizer and has_remainders:
        raise ValueError(
            "optimizer.use_precision_aware_optimizer=True cannot update FP8 weights with delayed scaling; set it to"
            " False, or mixed_precision.fp8_param=False"
        )


def check_sharding_of_fp8_weights(config: "ConfigContainer") -> None:
    """Check that Megatron FSDP gathers FP8 weights, which is when it renews their transposes.

    Without, backward passes on Hopper multiply by the transposes of an earlier step: gradients of other weights.

    ValueError: a sharding strategy that leaves the weights whole; MXFP8 keeps no transposes.
    """
    model, strategy = config.model, config.ddp.data_parallel_sharding_strategy
    keeps_transposes = getattr(model, "fp8", None) and model.fp8_param and model.fp8_recipe != "mxfp8"
    if config.ddp.use_megatron_fsdp and keeps_transposes and strategy in ("optim", "optim_grads"):
        raise ValueError(
            f"ddp.data_parallel_sharding_strategy={strategy!r} computes wrong gradients with FP8 weights; use"
            " 'optim_grads_params', or mixed_precision.fp8_param=False"
        )
