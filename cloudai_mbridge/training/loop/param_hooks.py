"""The hooks that gather a layer's parameters just before it runs, with the distributed optimizer's overlapped gather:
off until the first step has succeeded, and while something else reads or writes the parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from cloudai_mbridge.training.config.container import ConfigContainer


def should_disable_forward_pre_hook(
    use_megatron_fsdp: bool, use_distributed_optimizer: bool, overlap_param_gather: bool
) -> bool:
    """Return whether there are hooks to be disabled at times."""
    return not use_megatron_fsdp and use_distributed_optimizer and overlap_param_gather


def has_forward_pre_hooks(config: ConfigContainer) -> bool:
    """Return whether this run's chunks have such hooks."""
    optimizer, ddp = config.optimizer, config.ddp
    return should_disable_forward_pre_hook(
        ddp.use_megatron_fsdp, optimizer.use_distributed_optimizer, ddp.overlap_param_gather
    )


def enable_forward_pre_hook(model: list[DistributedDataParallel]) -> None:
    """Enable the hooks of every chunk. Raises AssertionError: a chunk is not wrapped for data parallelism."""
    for chunk in _wrapped(model):
        chunk.enable_forward_pre_hook()


def disable_forward_pre_hook(model: list[DistributedDataParallel], param_sync: bool = True) -> None:
    """Disable the hooks of every chunk. param_sync: gather all parameters now; a collective then.

    Raises AssertionError: a chunk is not wrapped for data parallelism.
    """
    for chunk in _wrapped(model):
        chunk.disable_forward_pre_hook(param_sync=param_sync)


def _wrapped(model: list[DistributedDataParallel]) -> Iterator[DistributedDataParallel]:
    for chunk in model:
        assert isinstance(chunk, DistributedDataParallel), f"{type(chunk).__name__} has no forward pre-hooks"
        yield chunk


def are_enabled(model: list[Any]) -> bool:
    """Return whether the hooks of the chunks are enabled now."""
    return any(getattr(chunk, "remove_forward_pre_hook_handles", None) for chunk in model)


@contextmanager
def without_forward_pre_hooks(model: list[Any]) -> Iterator[None]:
    """Gather all parameters and keep the hooks off inside `with`; afterwards they are as they were."""
    were_enabled = are_enabled(model)
    if were_enabled:
        disable_forward_pre_hook(model)
    try:
        yield
    finally:
        if were_enabled:
            enable_forward_pre_hook(model)


class FirstStepHooks:
    """Keeps the hooks off until the first step has succeeded: before it the parameters are not sharded yet."""

    def __init__(self, config: ConfigContainer, model: list[Any]) -> None:
        self._model = model
        self._waiting = has_forward_pre_hooks(config)
        if self._waiting:
            disable_forward_pre_hook(model, param_sync=False)
            self._param_sync_func = model[0].config.param_sync_func
            model[0].config.param_sync_func = None

    def step_done(self, skipped: bool) -> None:
        """Enable the hooks after the first step that was not skipped."""
        if self._waiting and not skipped:
            self._waiting = False
            enable_forward_pre_hook(self._model)
            self._model[0].config.param_sync_func = self._param_sync_func

    def close(self) -> None:
        """Disable the hooks for good, with all parameters gathered."""
        if are_enabled(self._model):
            disable_forward_pre_hook(self._model)
