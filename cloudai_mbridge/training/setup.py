"""Build what the loop needs: model, optimizer, scheduler, data."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import finalize_model_grads

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.data import build_dataset, micro_batches
from cloudai_mbridge.training.models.build import build_model
from cloudai_mbridge.training.optim import build_optimizer, build_scheduler


@dataclass
class SetupOutput:
    """A run ready to train; `train_data_iterator` is a list with virtual pipeline stages, as Megatron wants it."""

    model: list[Any]
    optimizer: Any
    scheduler: Any
    train_data_iterator: Iterator[Any] | list[Iterator[Any]]


def setup(config: ConfigContainer) -> SetupOutput:
    """Build everything on every rank. The process groups must be up."""
    model = build_model(config)
    optimizer = build_optimizer(config, model)
    _connect(config, model, optimizer)
    dataset = build_dataset(config)
    iterators = [micro_batches(config, dataset) for _ in model]
    return SetupOutput(
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        train_data_iterator=iterators if len(model) > 1 else iterators[0],
    )


def _connect(config: ConfigContainer, model: list[Any], optimizer: Any) -> None:
    """Tell the schedule how to scale the loss and to finish and overlap the gradients."""
    megatron_config = model[0].config
    megatron_config.grad_scale_func = optimizer.scale_loss
    megatron_config.finalize_model_grads_func = finalize_model_grads
    if config.ddp.overlap_grad_reduce:
        megatron_config.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
    if config.ddp.overlap_param_gather:
        megatron_config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in model])


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions
