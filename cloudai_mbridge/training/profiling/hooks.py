"""The three places at which the loop meets the profilers. No collectives: ranks that are not profiled may call them."""

from typing import Any

from cloudai_mbridge.training.config.profiling import ProfilingConfig, has_window, is_speaker, should_profile_rank
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.profiling.memory_history import write_memory_snapshot
from cloudai_mbridge.training.profiling.profilers import NsysCapture, start_nsys_profiler, stop_nsys_profiler


def handle_profiling_step(
    config: ProfilingConfig | None, iteration: int, rank: int, pytorch_prof: Any
) -> NsysCapture | None:
    """Tell the profilers that an iteration begins. iteration: steps done before it.

    Returns:
        A capture to keep until `handle_profiling_stop`, at the iteration that opens one; else None.
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
    nsys_nvtx_context: NsysCapture | None = None,
) -> None:
    """Stop the profilers at the end of their window. iteration: steps done, with the one that just ended."""
    if config is not None and should_profile_rank(config, rank) and iteration == config.profile_step_end:
        _stop(config, pytorch_prof, nsys_nvtx_context)


def finish_profiling(
    config: ProfilingConfig | None,
    rank: int,
    prof: Any,
    nsys_context: NsysCapture | None = None,
    *,
    iteration: int,
) -> None:
    """Stop what still runs, and write what was recorded; nothing if the window was over and its end not skipped.

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


def _stop(config: ProfilingConfig, prof: Any, nsys_context: NsysCapture | None) -> None:
    if config.use_pytorch_profiler and prof is not None:
        prof.stop()
    if config.use_nsys_profiler:
        stop_nsys_profiler(nsys_context)
