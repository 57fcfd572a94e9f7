"""Start of the process group and its communicators."""

import os
from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class DistributedInitConfig:
    """Backend, timeouts and communicators of `torch.distributed`, and the sharding library that uses them."""

    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    distributed_timeout_minutes: int = 10
    align_grad_reduce: bool = True  # all pipeline stages start gradient reduction together
    local_rank: int = field(
        default_factory=lambda: int(os.getenv("LOCAL_RANK", "0"))
    )  # LOCAL_RANK when this object is made
    lazy_mpu_init: bool = False  # the caller makes the groups later; weights are then initialised on the CPU
    use_megatron_fsdp: bool = False
    use_torch_fsdp2: bool = False
    nccl_communicator_config_path: str | None = None
    use_tp_pp_dp_mapping: bool = False  # rank order tp-pp-dp instead of tp-dp-pp
    use_gloo_process_groups: bool = True
    use_sharp: bool = False
    sharp_enabled_group: Literal["dp", "dp_replica"] | None = None
    high_priority_stream_groups: list[str] | None = field(default_factory=list)
    distributed_timeout_seconds_after_init: int | None = None  # a shorter timeout once the first step is done
    flight_recorder_dump_path: str | None = None
    flight_recorder_trace_buffer_size: int = 2000  # entries
    flight_recorder_dump_on_timeout: bool = True
    flight_recorder_include_stack_trace: bool = False
    flight_recorder_include_only_active: bool = True
    flight_recorder_extra_dump_on_exec: bool = True
    disable_jit_fuser: bool = False
    external_gpu_device_mapping: bool = False  # the launcher shows each process one GPU, as device 0
    enable_megatron_core_experimental: bool = False
    eval_context_parallel_size: int | None = None
    use_decentralized_pg: bool = False  # groups in a ProcessGroupCollection, not in Megatron-Core's globals

    @property
    def lazy_init(self) -> bool:
        """Stand for `lazy_mpu_init`, under Megatron-Bridge's name."""
        return self.lazy_mpu_init

    @lazy_init.setter
    def lazy_init(self, value: bool) -> None:
        self.lazy_mpu_init = value
