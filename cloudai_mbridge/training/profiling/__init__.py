"""Profile a few steps of some ranks: PyTorch's profiler with execution traces, or ranges for Nsight Systems.

The loop calls `initialize_pytorch_profiler` before its first step and starts what it returns, `handle_profiling_step`
at the top of every iteration with the steps done so far, `handle_profiling_stop` after every step with the steps done
now, and `finish_profiling` when it is left, however that happens.
"""

from cloudai_mbridge.training.config.profiling import has_window, should_profile_rank
from cloudai_mbridge.training.profiling.hooks import finish_profiling, handle_profiling_step, handle_profiling_stop
from cloudai_mbridge.training.profiling.nsys import NsysCapture, start_nsys_profiler, stop_nsys_profiler
from cloudai_mbridge.training.profiling.pytorch import StepProfiler, initialize_pytorch_profiler

__all__ = [
    "NsysCapture",
    "StepProfiler",
    "finish_profiling",
    "handle_profiling_step",
    "handle_profiling_stop",
    "has_window",
    "initialize_pytorch_profiler",
    "should_profile_rank",
    "start_nsys_profiler",
    "stop_nsys_profiler",
]
