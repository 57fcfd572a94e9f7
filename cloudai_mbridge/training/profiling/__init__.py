"""Profile a few steps of some ranks: PyTorch's profiler with execution traces, or ranges for Nsight Systems."""

from cloudai_mbridge.training.config.profiling import should_profile_rank
from cloudai_mbridge.training.profiling.profilers import (
    finish_profiling,
    handle_profiling_step,
    handle_profiling_stop,
    initialize_pytorch_profiler,
    start_nsys_profiler,
    stop_nsys_profiler,
)

__all__ = [
    "finish_profiling",
    "handle_profiling_step",
    "handle_profiling_stop",
    "initialize_pytorch_profiler",
    "should_profile_rank",
    "start_nsys_profiler",
    "stop_nsys_profiler",
]
