"""PyTorch's profiler, a trace and, if configured, an execution trace per rank; and ranges for Nsight Systems.

The loop calls the profilers' hooks. They are not collectives: ranks that are not profiled may leave them out.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import configure_nvtx_profiling
from torch.profiler import ExecutionTraceObserver, schedule, tensorboard_trace_handler

from cloudai_mbridge.training.config.profiling import ProfilingConfig, has_window, is_speaker, should_profile_rank
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.profiling.memory_history import write_memory_snapshot


class StepProfiler(torch.profiler.profile):
    """A profiler whose `start` and `stop` may be called twice, and whose execution trace is complete after `stop`."""

    is_running = False

    def start(self) -> None:
        """Begin to count steps."""
        if not self.is_running:
            super().start()
            self.is_running = True

    def stop(self) -> None:
        """End; write the trace of recorded steps that are not yet written, if any."""
        if not self.is_running:
            return
        self.is_running = False
        super().stop()
        observer: Any = self.execution_trace_observer
        if observer is not None:
            observer.cleanup()


def initialize_pytorch_profiler(
    config: ProfilingConfig | None,
    tensorboard_dir: str | Path | None = None,
    rank: int | None = None,
    first_step: int = 0,
) -> StepProfiler | None:
    """Make this rank's profiler, not started; None if it is off, for other ranks, or for an empty window.

    A step is named as in the log: `ProfilerStep#12` is iteration 12, if training starts at step 0. The window is
    `profile_step_start <= iteration < profile_step_end`; the step before it warms the profiler up.

    tensorboard_dir: directory of the traces, `./torch_profile` without it; execution traces go to its `chakra`.
    rank: this process's by default. first_step: steps done before this run; the window counts from the job's first.
    """
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    if config is None or not config.use_pytorch_profiler or not should_profile_rank(config, rank):
        return None
    if not has_window(config, first_step):
        if is_speaker(config, rank):
            window = f"[{config.profile_step_start}, {config.profile_step_end})"
            write_line(f"profiling: no step to profile in {window} when training starts with {first_step} steps done")
        return None
    directory = Path(tensorboard_dir or "./torch_profile")
    start = max(config.profile_step_start - first_step, 0)
    return StepProfiler(
        schedule=schedule(
            wait=max(start - 1, 0),
            warmup=1 if start > 0 else 0,
            active=config.profile_step_end - first_step - start,
            repeat=1,
        ),
        on_trace_ready=tensorboard_trace_handler(str(directory), worker_name=f"rank-{rank}"),
        record_shapes=config.record_shapes or config.pytorch_profiler_collect_shapes,
        with_stack=config.pytorch_profiler_collect_callstack,
        execution_trace_observer=_chakra(directory, rank) if config.pytorch_profiler_collect_chakra else None,
    )


def _chakra(directory: Path, rank: int) -> Any:
    """Return an observer that writes the rank's graph of operators: torch's format, the input of Chakra's tools."""
    path = directory / "chakra" / f"rank-{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return ExecutionTraceObserver().register_callback(str(path))


def start_nsys_profiler(config: ProfilingConfig) -> ExitStack | None:
    """Open a capture on this rank: its GPU's profiler is on, every operator emits an NVTX range. None without a GPU."""
    if not torch.cuda.is_available():
        return None
    capture = ExitStack()
    gpu: Any = torch.cuda
    runtime = gpu.cudart()
    _check(runtime.cudaProfilerStart())
    capture.callback(lambda: _check(runtime.cudaProfilerStop()))
    if config.nvtx_ranges:
        configure_nvtx_profiling(True)
        capture.callback(configure_nvtx_profiling, False)
    autograd: Any = torch.autograd
    capture.enter_context(autograd.profiler.emit_nvtx(record_shapes=config.record_shapes))
    return capture


def stop_nsys_profiler(capture: ExitStack | None) -> None:
    """End the ranges, then the capture; None and a closed one are left alone."""
    if capture is not None:
        capture.close()


def _check(status: Any) -> None:
    torch.cuda.check_error(int(status))


def handle_profiling_step(
    config: ProfilingConfig | None, iteration: int, rank: int, pytorch_prof: Any
) -> ExitStack | None:
    """Notify the profilers that an iteration begins. iteration: steps done before it.

    Returns a capture to keep until `handle_profiling_stop`, at the iteration that opens one; else None.
    """
    if config is None or not should_profile_rank(config, rank):
        return None
    if config.use_pytorch_profiler and pytorch_prof is not None:
        pytorch_prof.step()
    if not config.use_nsys_profiler or iteration != config.profile_step_start or not has_window(config):
        return None
    capture = start_nsys_profiler(config)
    if capture is None and is_speaker(config, rank):
        write_line("profiling: ranges for Nsight Systems need a GPU; this run has none, nothing is captured")
    return capture


def handle_profiling_stop(
    config: ProfilingConfig | None,
    iteration: int,
    rank: int,
    pytorch_prof: Any,
    nsys_nvtx_context: ExitStack | None = None,
) -> None:
    """Stop the profilers at the end of their window. iteration: steps done, including the step that just ended."""
    if config is not None and should_profile_rank(config, rank) and iteration == config.profile_step_end:
        _stop(config, pytorch_prof, nsys_nvtx_context)


def finish_profiling(
    config: ProfilingConfig | None, rank: int, prof: Any, nsys_context: ExitStack | None = None, *, iteration: int
) -> None:
    """Stop running profilers, and write the recordings; nothing if the window was over and its end not skipped.

    Call it whenever the loop is left, also by an error. iteration: steps done.
    """
    if config is None or not should_profile_rank(config, rank):
        return
    _stop(config, prof, nsys_context)
    if iteration >= config.profile_step_end:
        return
    write_memory_snapshot(config, rank)
    if (config.use_pytorch_profiler or config.use_nsys_profiler) and is_speaker(config, rank):
        window = f"[{config.profile_step_start}, {config.profile_step_end})"
        write_line(f"profiling: training ended after {iteration} steps, before the end of the window {window}")


def _stop(config: ProfilingConfig, prof: Any, nsys_context: ExitStack | None) -> None:
    if config.use_pytorch_profiler and prof is not None:
        prof.stop()
    if config.use_nsys_profiler:
        stop_nsys_profiler(nsys_context)
