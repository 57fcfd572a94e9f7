"""Fault tolerance, straggler detection and restarts inside the process."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class FaultToleranceConfig:
    """NVIDIA Resiliency Extension's heartbeat sections, and a fault to simulate."""

    enable_ft_package: bool = False
    calc_ft_timeouts: bool = False  # learn the section timeouts from this run
    simulate_fault: bool = False
    simulated_fault_type: Literal["rank_hung", "rank_killed", "random"] = "random"
    simulated_fault_rank: int | None = None  # None: one rank at random
    simulated_fault_base_delay: int = 0  # seconds


@dataclass(kw_only=True)
class StragglerDetectionConfig:
    """Megatron-Core's straggler detector, which times sections of each step on the GPU."""

    log_straggler: bool = False
    straggler_ctrlr_port: int = 65535  # rank 0 listens here for the request that toggles the detector
    straggler_minmax_count: int = 1  # ranks named at each end of the report
    disable_straggler_on_startup: bool = False
    enable_straggler_on_startup: bool = True


@dataclass
class NVRxStragglerDetectionConfig:
    """NVIDIA Resiliency Extension's straggler detection; scores run from 0 (slow) to 1 (as the best)."""

    enabled: bool = False
    report_time_interval: float = 300.0  # seconds
    calc_relative_gpu_perf: bool = True  # against the other ranks
    calc_individual_gpu_perf: bool = True  # against the rank's own best
    num_gpu_perf_scores_to_print: int = 5
    gpu_relative_perf_threshold: float = 0.7
    gpu_individual_perf_threshold: float = 0.7
    stop_if_detected: bool = False
    enable_logging: bool = True
    profiling_interval: int = 1
    logger_name: str = "megatron.bridge.NVRxStragglerDetection"

    def finalize(self) -> None:
        """Raise ValueError if enabled with nothing to calculate, an interval <= 0, or a threshold outside [0, 1]."""
        if not self.enabled:
            return
        if not (self.calc_relative_gpu_perf or self.calc_individual_gpu_perf):
            raise ValueError("calc_relative_gpu_perf and calc_individual_gpu_perf are both off: enable at least one")
        if not self.report_time_interval > 0:
            raise ValueError(f"report_time_interval={self.report_time_interval} must be positive")
        for name in ("gpu_relative_perf_threshold", "gpu_individual_perf_threshold"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1")


@dataclass
class InProcessRestartConfig:
    """NVIDIA Resiliency Extension's restart of the training function inside its process; times are in seconds."""

    enabled: bool = False
    max_iterations: int | None = None  # restarts before giving up
    monitor_thread_interval: float = 1.0
    monitor_process_interval: float = 1.0
    progress_watchdog_interval: float = 1.0
    heartbeat_interval: float = 30.0
    soft_timeout: float = 60.0
    hard_timeout: float = 90.0
    heartbeat_timeout: float = 60.0
    barrier_timeout: float = 120.0
    completion_timeout: float = 120.0
    last_call_wait: float = 1.0
    termination_grace_time: float = 1.0
    granularity: Literal["node", "rank"] = "node"  # unit excluded after a fault
    active_world_size: int | None = None  # ranks that train; the others stand by
    empty_cuda_cache: bool = True
    max_rank_faults: int | None = None
    monitor_process_logdir: str | None = None
