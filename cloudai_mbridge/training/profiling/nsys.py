"""Ranges for Nsight Systems: `nsys profile --capture-range=cudaProfilerApi` records only between start and stop."""

import contextlib
from typing import Any

import torch
from megatron.core.utils import configure_nvtx_profiling

from cloudai_mbridge.training.config.profiling import ProfilingConfig


class NsysCapture:
    """An open capture: the GPU's profiler is on, every operator emits an NVTX range."""

    def __init__(self, config: ProfilingConfig) -> None:
        self._open = contextlib.ExitStack()
        gpu: Any = torch.cuda
        runtime = gpu.cudart()
        _check(runtime.cudaProfilerStart())
        self._open.callback(lambda: _check(runtime.cudaProfilerStop()))
        if config.nvtx_ranges:
            configure_nvtx_profiling(True)
            self._open.callback(configure_nvtx_profiling, False)
        autograd: Any = torch.autograd
        self._open.enter_context(autograd.profiler.emit_nvtx(record_shapes=config.record_shapes))

    def stop(self) -> None:
        """End the ranges, then the capture; a second call does nothing."""
        self._open.close()


def start_nsys_profiler(config: ProfilingConfig) -> NsysCapture | None:
    """Open a capture on this rank; None without a GPU."""
    return NsysCapture(config) if torch.cuda.is_available() else None


def stop_nsys_profiler(capture: NsysCapture | None) -> None:
    """Close a capture; None and a closed one are left alone."""
    if capture is not None:
        capture.stop()


def _check(status: Any) -> None:
    torch.cuda.check_error(int(status))
