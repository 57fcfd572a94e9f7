"""The hooks that gather a layer's parameters just before it runs, with the distributed optimizer's overlapped gather:
off until the first step has succeeded, and while something else reads or writes the parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from cloudai_mbridge.training.compat import quantized
from cloudai_mbridge.training.config.container import ConfigContainer

# Attribute of the chunks whose parameters are gathered in the buffer of the gradients: prepares a forced gather
STAGE = "stage_main_params"
# Attribute of Megatron-Core's layers with fused operations: a tuple of them, None until the first forward pass
_FUSED_OPERATIONS = "_fused_impl"


def should_disable_forward_pre_hook(
    use_megatron_fsdp: bool, use_distributed_optimizer: bool, overlap_param_gather: bool
) -> bool:
    """Return whether the chunks have hooks that must be disabled at times."""
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
        # Megatron-Core builds Transformer Engine's fused operations in the first forward pass, with the hooks that
        # their layers have then. Without hooks nothing waits for the gathered parameters, and the next gather fails:
        # operations that were built without are built again
        for module in chunk.modules():
            built = getattr(module, _FUSED_OPERATIONS, None)
            if built is not None and not built[0]._forward_pre_hooks:
                setattr(module, _FUSED_OPERATIONS, None)


def disable_forward_pre_hook(model: list[DistributedDataParallel], param_sync: bool = True) -> None:
    """Disable the hooks of every chunk. param_sync: gather all parameters now; a collective then.

    Raises AssertionError: a chunk is not wrapped for data parallelism.
    """
    chunks = list(_wrapped(model))
    for chunk in chunks:
        chunk.disable_forward_pre_hook(param_sync=False)
    if not param_sync:
        return
    if stage := getattr(chunks[0], STAGE, None):
        stage()
    for chunk in chunks:
        quantized.gather(chunk)


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
    """Keeps the hooks off until the first step has succeeded: before it the parameters are not sharded yet.

    A resumed run in MXFP8 has them on from the start, as Megatron-Bridge 0.6: it takes the main parameters of the
    checkpoint, as an uninterrupted run does, not the values rounded to 8 bits.
    """

    def __init__(self, config: ConfigContainer, model: list[Any], is_resumed: bool = False) -> None:
        self._model = model
        is_mxfp8 = config.model.fp8 and str(config.model.fp8_recipe).lower().endswith("mxfp8")
        self._waiting = has_forward_pre_hooks(config) and not (is_resumed and is_mxfp8)
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
