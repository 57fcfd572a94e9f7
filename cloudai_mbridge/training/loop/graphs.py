"""CUDA graphs: capture, eager replacement, deletion. The order is Megatron-Bridge's.

Megatron-Core has three kinds. Its own ("local") records the layers in the first step and captures them at the end of
it. Transformer Engine's are captured between two steps, by this module. The graph of a full iteration wraps the
schedule, and another one the optimizer's step; both keep their captures in their classes.
"""

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import full_cuda_graph
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.transformer import cuda_graphs as layer_graphs

from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.data.packed_batch import with_fixed_bounds
from cloudai_mbridge.training.loop import param_hooks
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.process.log_lines import write_line

try:
    from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper
except ImportError:  # 0.16 has neither such a graph nor its field
    OptimizerCudaGraphWrapper = None

CAPTURED_MARK = "CUDA graphs captured:"  # begins the line at the end of training
_TRAINING, _VALIDATION = "training", "validation"


class TrainingGraphs:
    """The graphs of one call of `train`: Transformer Engine's graphs of the layers, and the optimizer step's."""

    def __init__(self, config: ConfigContainer, model: list[Any], optimizer: Any) -> None:
        delete_all()  # remains of an earlier run of this process
        self._config, self._model, self._optimizer = config, model, optimizer
        self._steps, self._hooks_are_manual = 0, False
        is_te = cuda_graphs.implementation(config.model) == "transformer_engine"
        self._helper: Any = None
        if is_te:
            self._helper = layer_graphs.TECudaGraphHelper(
                model=model,
                config=model[0].config,
                seq_length=config.model.seq_length,
                micro_batch_size=config.train.micro_batch_size,
                optimizers=[optimizer],
            )
        self._eager_step = _graph_optimizer(config, optimizer)

    def capture_if_due(self, pause: Callable[[], AbstractContextManager[None]]) -> None:
        """Capture once, when the warm-up steps are done. A collective. pause: stops the step's clock meanwhile."""
        helper = self._helper
        if helper is None or self._steps < self._config.model.cuda_graph_warmup_steps:
            return
        # The capture may have found no layer. 0.16 reports only whether graphs exist
        if getattr(helper, "capture_finished", helper.graphs_created)():
            return
        with pause():
            # Layers run that no optimizer step needs: the parameter hooks are off, and gather nothing
            if were_enabled := param_hooks.are_enabled(self._model):
                param_hooks.disable_forward_pre_hook(self._model, param_sync=False)
            helper.create_cudagraphs()
            if were_enabled:
                param_hooks.enable_forward_pre_hook(self._model)
        self._gather_in_replays()

    def step_done(self, skipped: bool) -> None:
        """Count a step, from the first that was not skipped on; call it when the parameter hooks are as they stay."""
        if self._steps or not skipped:
            self._steps += 1
        self._gather_in_replays()

    def _gather_in_replays(self) -> None:
        """Hand the parameter hooks to the captured layers: a replay calls no forward hooks of modules."""
        helper = self._helper
        if helper is None or self._hooks_are_manual or not helper.graphs_created():
            return
        if param_hooks.are_enabled(self._model):
            helper.cuda_graph_set_manual_hooks()
            self._hooks_are_manual = True

    def close(self) -> None:
        """Delete the captures of training: graphs hold buffers of NCCL, whose groups could not be destroyed."""
        has_local = getattr(layer_graphs._CudagraphGlobalRecord, "cudagraph_created", False)
        has_engine = self._helper is not None and self._helper.graphs_created()
        captured = {
            "layers": has_local or has_engine,
            "full iteration": FullCudaGraphWrapper.cuda_graph[_TRAINING],
            "optimizer": getattr(OptimizerCudaGraphWrapper, "cuda_graph", None),
        }
        if (found := [name for name, is_there in captured.items() if is_there]) and dist.get_rank() == 0:
            write_line(f"{CAPTURED_MARK} {', '.join(found)}")
        if has_engine:
            self._helper.delete_cuda_graphs()
        if self._eager_step is not None:
            self._optimizer.step = self._eager_step
        _forget(_TRAINING)


def schedule(function: Callable[..., Any], config: ConfigContainer, options: dict[str, Any]) -> Callable[..., Any]:
    """Return Megatron's schedule, inside a graph of the full iteration if there is one.

    options: arguments of the schedule. An evaluation that collects other data than losses is not captured: the graph
    would return the losses.
    """
    if not cuda_graphs.captures_full_iteration(config.model) or options.get("collect_non_loss_data"):
        return function
    return _full_iteration(function, config.model.cuda_graph_warmup_steps, config.model.cuda_graph_use_single_mempool)


@cache
def _full_iteration(function: Callable[..., Any], warmup_steps: int, single_pool: bool) -> Callable[..., Any]:
    options = {"use_single_mempool": single_pool}
    known = inspect.signature(FullCudaGraphWrapper).parameters  # 0.16 and 0.17 have one pool for each graph
    wrapped = FullCudaGraphWrapper(
        function, warmup_steps, **{name: value for name, value in options.items() if name in known}
    )

    def run(*, data_iterator: Any, **more: Any) -> Any:
        result = wrapped(data_iterator=_fixed(data_iterator), **more)
        if more["forward_only"]:
            torch.cuda.synchronize()  # as Megatron-Bridge does: the next replay overwrites this result
        return result

    return run


def _fixed(iterators: Any) -> Any:
    """Give the packed batches of one iterator, or of a list of them, bounds of one shape; they are on the host yet."""
    if isinstance(iterators, list):
        return [_fixed(each) for each in iterators]
    if iterators is None:
        return None
    return map(with_fixed_bounds, iter(partial(next, iterators), None))  # Megatron-Core's iterators only have `next`


def gradient_stream(config: ConfigContainer) -> AbstractContextManager[None]:
    """Return the stream on which to wrap a model for data parallelism: its gradient nodes remember it.

    A graph can capture no work on the default stream; that of a full iteration captures its own stream only.
    """
    if not cuda_graphs.implementation(config.model) or not torch.cuda.is_available():
        return nullcontext()
    shared = getattr(full_cuda_graph, "get_shared_capture_stream", None)  # since 0.19
    is_full = cuda_graphs.captures_full_iteration(config.model)
    new: Any = torch.cuda.Stream
    return _on(shared() if is_full and shared is not None else new())


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def delete_all() -> None:
    """Delete the remaining graphs after the last evaluation, before the process groups are destroyed."""
    for stage in (_TRAINING, _VALIDATION):
        _forget(stage)
    if getattr(layer_graphs._CudagraphGlobalRecord, "cudagraph_created", False):
        layer_graphs.delete_cuda_graphs()


def _forget(stage: str) -> None:
    had_any = bool(FullCudaGraphWrapper.cuda_graph[stage])
    FullCudaGraphWrapper.cuda_graph[stage] = FullCudaGraphWrapper.result[stage] = None
    FullCudaGraphWrapper.curr_iteration[stage] = 0
    StaticBufferLoader.static_buffers[stage].clear()
    if stage == _TRAINING and OptimizerCudaGraphWrapper is not None:
        had_any |= bool(OptimizerCudaGraphWrapper.cuda_graph)
        OptimizerCudaGraphWrapper.cuda_graph = OptimizerCudaGraphWrapper.result = None
        OptimizerCudaGraphWrapper.curr_iteration = 0
    if had_any:
        gc.collect()  # a graph that waits for the collector holds its buffers


def _graph_optimizer(config: ConfigContainer, optimizer: Any) -> Any:
    """Capture the optimizer's step, if configured, and return the eager step; else return None."""
    if not getattr(config.optimizer, "optimizer_cuda_graph", False) or OptimizerCudaGraphWrapper is None:
        return None
    eager, model = optimizer.step, config.model
    for group in optimizer.param_groups:  # of a checkpoint it is a number, which would stay as it was captured
        if not torch.is_tensor(group["lr"]):
            group["lr"] = torch.tensor(float(group["lr"]), device=current_device())
    known = inspect.signature(OptimizerCudaGraphWrapper).parameters
    options = {"use_single_mempool": model.cuda_graph_use_single_mempool} if "use_single_mempool" in known else {}
    optimizer.step = OptimizerCudaGraphWrapper(eager, model.cuda_graph_warmup_steps, **options)
    return eager
