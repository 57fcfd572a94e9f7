"""Bring up and take down the process groups of a run."""

import os
import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.config import set_experimental_flag
from megatron.core.jit import disable_jit_fuser
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from cloudai_mbridge.training.comm_overlap.user_buffers import start_user_buffers
from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.compat.batches import count_micro_batches
from cloudai_mbridge.training.config.container import ConfigContainer, required
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.device import bind_local_device, current_device
from cloudai_mbridge.training.process.groups import embedding_ranks, grid_groups, make_grid_groups, set_flight_recorder
from cloudai_mbridge.training.process.loopback import use_loopback
from cloudai_mbridge.training.upstream import missing

_LAYOUT = (
    "tensor_model_parallel",
    "pipeline_model_parallel",
    "virtual_pipeline_model_parallel",
    "context_parallel",
    "expert_model_parallel",
)


def initialize(config: ConfigContainer, store: Any = None) -> bool:
    """Start torch.distributed and Megatron on it; return whether the process group is this call's.

    Without torchrun's variables the run is a single process. store: rendezvous of the ranks; None: torchrun's.

    ConfigError: Megatron's groups are up already, with another layout.
    """
    if owns_group := not dist.is_initialized():
        backend = config.dist.distributed_backend
        bind_local_device(backend, sees_one=config.dist.external_gpu_device_mapping)
        if backend == "nccl" and cuda_graphs.implementation(config.model) == "transformer_engine":
            # no graph captures the default one
            torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        set_flight_recorder(config.dist)
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        timeout = timedelta(minutes=config.dist.distributed_timeout_minutes)
        if store is None and "MASTER_ADDR" not in os.environ:
            use_loopback()
            store, rank, world_size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    if mpu.model_parallel_is_initialized():
        for name in _LAYOUT:
            wanted, there = getattr(config.model, f"{name}_size"), getattr(mpu, f"get_{name}_world_size")()
            if (wanted or 1) != (there or 1):
                raise ConfigError(
                    f"model.{name}_size = {wanted}, but Megatron's groups are up with {there}: call"
                    " megatron.core.parallel_state.destroy_model_parallel() first"
                )
        if config.dist.use_decentralized_pg != (grid_groups() is not None):
            raise ConfigError(
                f"dist.use_decentralized_pg = {config.dist.use_decentralized_pg}, but other groups are up: call"
                " megatron.core.parallel_state.destroy_model_parallel() first"
            )
        destroy_num_microbatches_calculator()  # it holds the batch size of an earlier run
    initialize_megatron(config)
    return owns_group


def initialize_megatron(config: ConfigContainer) -> None:
    """Make Megatron's groups, unless they are up, and user buffers; seed every generator; count micro-batches."""
    set_experimental_flag(config.dist.enable_megatron_core_experimental)
    if config.dist.disable_jit_fuser:
        disable_jit_fuser()  # of later imports, as upstream does
    if not mpu.model_parallel_is_initialized():
        _make_groups(config)
    _seed_generators(config)
    count_micro_batches(dist.get_rank(), config.train, mpu.get_data_parallel_world_size())
    start_user_buffers(config.model, required(config.train.micro_batch_size))


def _make_groups(config: ConfigContainer) -> None:
    if config.dist.use_decentralized_pg:
        make_grid_groups(config)
    else:
        mpu.initialize_model_parallel(
            **{f"{name}_size": getattr(config.model, f"{name}_size") for name in (*_LAYOUT, "expert_tensor_parallel")},
            hierarchical_context_parallel_sizes=config.model.hierarchical_context_parallel_sizes,
            num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
            pipeline_model_parallel_comm_backend=config.model.pipeline_model_parallel_comm_backend,
            order="tp-cp-ep-pp-dp" if config.dist.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            use_sharp=config.dist.use_sharp,
            sharp_enabled_group=config.dist.sharp_enabled_group,
            get_embedding_ranks=lambda ranks, pp=None: embedding_ranks(config.model, ranks),
            nccl_communicator_config_path=config.dist.nccl_communicator_config_path,
            high_priority_stream_groups=config.dist.high_priority_stream_groups,
            distributed_timeout_minutes=config.dist.distributed_timeout_minutes,
            # on a CPU the groups are gloo already
            create_gloo_process_groups=config.dist.use_gloo_process_groups and current_device().type == "cuda",
        )


def _seed_generators(config: ConfigContainer) -> None:
    """Seed as Megatron does: pipeline stages draw different numbers, so that dropout differs between them.

    Data-parallel ranks do with `data_parallel_random_init`; their weights follow from seed and name as always.

    A tracker of another kind, which an earlier run of this process has left, is replaced; a CPU has one kind only.
    """
    own = config.rng.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    if config.rng.data_parallel_random_init:
        own += 10 * mpu.get_data_parallel_rank()
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(
        own,
        te_rng_tracker=config.rng.te_rng_tracker,
        inference_rng_tracker=config.rng.inference_rng_tracker,
        use_cudagraphable_rng=bool(cuda_graphs.implementation(config.model)),
        force_reset_rng=current_device().type == "cuda",
    )


def destroy() -> None:
    """Leave together, so that no rank closes a connection that another still reads."""
    dist.barrier()
    mpu.destroy_model_parallel()
    destroy_num_microbatches_calculator()
    dist.destroy_process_group()


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
