"""Keep what a loss function reports from Megatron-Core, which scales the loss itself in place afterwards."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def with_own_reports(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward step whose loss function reports copies of what shares the loss's memory.

    A loss reported with `.detach()` alone would be logged divided by the number of micro-batches
    (megatron.core.pipeline_parallel.schedules.forward_step_calc_loss).
    """

    @wraps(forward_step, updated=())
    def step(*args: Any, **kwargs: Any) -> Any:
        output, loss_function = forward_step(*args, **kwargs)
        return output, None if loss_function is None else _copying(loss_function)

    return step


def _copying(loss_function: Callable[..., Any]) -> Callable[..., Any]:
    def function(output: Any, **options: Any) -> Any:
        result = loss_function(output, **options)
        if not isinstance(result, tuple) or not isinstance(result[-1], dict):
            return result  # not of training
        loss, *count, reports = result
        return loss, *count, {name: _apart(value, loss) for name, value in reports.items()}

    return function


def _apart(value: Any, loss: Any) -> Any:
    if not (torch.is_tensor(value) and torch.is_tensor(loss)):
        return value
    is_shared = value.untyped_storage().data_ptr() == loss.untyped_storage().data_ptr()
    return value.detach().clone() if is_shared else value
