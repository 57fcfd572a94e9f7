"""Rules of fully-sharded data parallelism: Megatron FSDP and torch's FSDP2."""

import os
from typing import TYPE_CHECKING

from cloudai_mbridge.training.config.text.summary import print_rank_0

if TYPE_CHECKING:
    from cloudai_mbridge.training.config.container import ConfigContainer


def check_one_fsdp(config: "ConfigContainer") -> None:
    """Check that at most one kind of fully-sharded data parallelism is on."""
    if config.dist.use_megatron_fsdp and config.dist.use_torch_fsdp2:
        raise ValueError("dist.use_megatron_fsdp and dist.use_torch_fsdp2 exclude each other; set one of them")


def _uses_megatron_fsdp(config: "ConfigContainer") -> bool:
    return bool(config.dist.use_megatron_fsdp or config.ddp.use_megatron_fsdp)


def _uses_checkpoints(config: "ConfigContainer") -> bool:
    return config.checkpoint.save is not None or config.checkpoint.load is not None


def apply_megatron_fsdp(config: "ConfigContainer") -> None:
    """Turn Megatron FSDP on in both places if either enables it, with its dependent settings, and check it."""
    if not _uses_megatron_fsdp(config):
        return
    ddp, optimizer = config.ddp, config.optimizer
    config.dist.use_megatron_fsdp = ddp.use_megatron_fsdp = True
    if not (ddp.use_distributed_optimizer and optimizer.use_distributed_optimizer):
        print_rank_0("Megatron FSDP has a distributed optimizer: use_distributed_optimizer is set to True")
    ddp.use_distributed_optimizer = optimizer.use_distributed_optimizer = True
    if optimizer.use_precision_aware_optimizer and hasattr(ddp, "megatron_fsdp_use_decoupled_grad"):
        ddp.megatron_fsdp_use_decoupled_grad = True  # Transformer Engine's Adam reads gradients there
    if ddp.nccl_ub:
        ddp.fsdp_manual_registration = True
    check_megatron_fsdp(config)


def check_megatron_fsdp(config: "ConfigContainer") -> None:
    """Check the requirements and conflicts of Megatron FSDP."""
    ddp, checkpoint = config.ddp, config.checkpoint
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


def drop_what_fsdp_lacks(config: "ConfigContainer") -> None:
    """Turn off, with a message on rank 0, the options that Megatron FSDP lacks."""
    if not _uses_megatron_fsdp(config):
        return
    ddp, optimizer = config.ddp, config.optimizer
    if ddp.average_in_collective and not ddp.disable_symmetric_registration:
        print_rank_0("ddp.average_in_collective does not work with NCCL's symmetric registration: set to False")
        ddp.average_in_collective = False
    if ddp.reuse_grad_buf_for_mxfp8_param_ag or optimizer.reuse_grad_buf_for_mxfp8_param_ag:
        print_rank_0("reuse_grad_buf_for_mxfp8_param_ag does not exist in Megatron FSDP: set to False")
        ddp.reuse_grad_buf_for_mxfp8_param_ag = optimizer.reuse_grad_buf_for_mxfp8_param_ag = False


def check_fsdp_format(config: "ConfigContainer") -> None:
    """Check that the format of Megatron FSDP's checkpoints is used with Megatron FSDP alone."""
    if _uses_checkpoints(config) and config.checkpoint.ckpt_format == "fsdp_dtensor":
        is_megatron_fsdp = config.ddp.use_megatron_fsdp and not config.dist.use_torch_fsdp2
        assert is_megatron_fsdp, (
            "checkpoint.ckpt_format='fsdp_dtensor' requires ddp.use_megatron_fsdp=True and dist.use_torch_fsdp2=False"
        )
