"""Profile a few steps of some ranks: PyTorch's profiler with a trace and, if configured, an execution trace per rank;
ranges for Nsight Systems; the GPU allocator's history, for torch's memory viewer (https://pytorch.org/memory_viz); and
statistics of the tensors inside Transformer Engine's layers, by NVIDIA's nvdlfw_inspect.

The loop calls the profilers' hooks. They are not collectives: ranks that are not profiled may leave them out.
"""

import os
import pickle
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_tensor_and_data_parallel_group
from megatron.core.utils import configure_nvtx_profiling
from torch.profiler import ExecutionTraceObserver, schedule, tensorboard_trace_handler

from cloudai_mbridge.training.config.profiling import (
    ProfilingConfig,
    TensorInspectConfig,
    has_window,
    is_speaker,
    shipped_features,
    should_profile_rank,
)
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.log_lines import write_line


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
    operators: Any = None  # their graph, in torch's format, the input of Chakra's tools
    if config.pytorch_profiler_collect_chakra:
        path = directory / "chakra" / f"rank-{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        operators = ExecutionTraceObserver().register_callback(str(path))
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
        execution_trace_observer=operators,
    )


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
    _write_memory_snapshot(config, rank)
    if (config.use_pytorch_profiler or config.use_nsys_profiler) and is_speaker(config, rank):
        window = f"[{config.profile_step_start}, {config.profile_step_end})"
        write_line(f"profiling: training ended after {iteration} steps, before the end of the window {window}")


def _stop(config: ProfilingConfig, prof: Any, nsys_context: ExitStack | None) -> None:
    if config.use_pytorch_profiler and prof is not None:
        prof.stop()
    if config.use_nsys_profiler:
        stop_nsys_profiler(nsys_context)


def start_memory_history_recording(profiling: ProfilingConfig | None) -> None:
    """Record every allocation of this rank's GPU from now on, with Python stacks. Call it before the model is built.

    Running out of memory writes a snapshot to `{base}_oom_rank-{rank}{ext}` of `memory_snapshot_path`. No-op if it
    is off or for other ranks (an empty `profile_ranks` means all); on a CPU one line is logged.
    """
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    if not _records(profiling, rank):
        return
    assert profiling is not None
    if not torch.cuda.is_available():
        if is_speaker(profiling, rank):
            write_line("memory history: it needs a GPU; this run has none, nothing is recorded")
        return
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=100_000)
    base, ext = os.path.splitext(profiling.memory_snapshot_path)
    path = Path(f"{base}_oom_rank-{rank}{ext}")
    write_line(f"memory history: recording on rank {rank}; out of memory writes {path}")
    core: Any = torch._C
    core._cuda_attach_out_of_memory_observer(lambda *_: _write_snapshot(path))  # called before torch raises


def dump_memory_snapshot(config: ProfilingConfig | None, iteration: int, rank: int) -> None:
    """Write the snapshot `{base}_{rank}{ext}` at the end of the window. iteration: steps done."""
    if config is not None and iteration == config.profile_step_end:
        _write_memory_snapshot(config, rank)


def _write_memory_snapshot(config: ProfilingConfig, rank: int) -> None:
    if _records(config, rank) and torch.cuda.is_available():
        base, ext = os.path.splitext(config.memory_snapshot_path)
        _write_snapshot(Path(f"{base}_{rank}{ext}"))


def _records(config: ProfilingConfig | None, rank: int) -> bool:
    return config is not None and config.record_memory_history and should_profile_rank(config, rank)


def _write_snapshot(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(torch.cuda.memory._snapshot(), file)


def start_tensor_inspection(config: TensorInspectConfig | None) -> None:
    """Start it, before the first layer is made. Every rank calls it.

    Raises ConfigError: features that cannot be read, or directories of others' code that are not allowed.
    """
    if config is None or not config.enabled:
        return
    own = config.feature_dirs and config.feature_dirs != shipped_features()
    if own and not config.allow_custom_feature_dirs:
        raise ConfigError(
            f"tensor_inspect.feature_dirs = {config.feature_dirs!r} holds code that would run; set"
            " tensor_inspect.allow_custom_feature_dirs = True if you trust it"
        )
    api = _api()
    api.end_debug()  # of an earlier run of this process that failed
    try:
        api.initialize(
            config_file=config.features or "",
            feature_dirs=config.feature_dirs,
            log_dir=config.log_dir,
            init_training_step=config.init_training_step,
            default_logging_enabled=True,
        )
    except Exception as error:  # whatever the package raises, the features are at fault
        text = " ".join(str(error).split())
        raise ConfigError(f"tensor_inspect.features = {config.features!r}: {text} ({type(error).__name__})") from error


def connect_tensor_inspection(config: TensorInspectConfig | None, model: list[Any], state: Any) -> None:
    """Name the layers, count from the finished step, and log to the run's loggers. After the checkpoint is loaded."""
    if config is None or not config.enabled:
        return
    api = _api()
    _add_loggers(state)
    api.initialize_training_step(state.train_state.step)
    api.infer_and_assign_layer_names(model)
    api.set_tensor_reduction_group(get_tensor_and_data_parallel_group())


def step_tensor_inspection(config: TensorInspectConfig | None) -> None:
    """Count a finished step, and write its statistics."""
    if config is not None and config.enabled:
        _api().step()


def stop_tensor_inspection(config: TensorInspectConfig | None) -> None:
    """End it. May be called again."""
    if config is not None and config.enabled:
        _api().end_debug()


def _api() -> Any:
    import nvdlfw_inspect.api as api

    return api


def _add_loggers(state: Any) -> None:
    from nvdlfw_inspect.logging import BaseLogger, MetricLogger, wrap_tensorboard_writer

    if state.tensorboard_logger is not None:
        MetricLogger.add_logger(wrap_tensorboard_writer(state.tensorboard_logger))
    wandb, comet = state.wandb_logger, state.comet_logger

    class Forward(BaseLogger):  # type: ignore[misc]
        def log_scalar(self, name: str, value: float, iteration: int, **kwargs: Any) -> None:
            if wandb is not None:
                wandb.log({name: value}, step=iteration)
            if comet is not None:
                comet.log_metrics({name: value}, step=iteration)

    if wandb is not None or comet is not None:
        MetricLogger.add_logger(Forward())
