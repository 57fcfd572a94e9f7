"""Preparation of the forward step: binding of the run's GlobalState, if an annotation or the name of the first
parameter requests it, and copies of the values that the loss function reports."""

import inspect
import types
from collections.abc import Callable
from functools import partial, wraps
from typing import Annotated, Any, ForwardRef, Union, get_args, get_origin

import torch

_STATE = "GlobalState"  # found by name: importing the class here would be a cycle
_STATE_NAMES = ("state", "global_state")
_PASSED_BY_SCHEDULE = 2  # data iterator and model, in this order and by position
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def prepare_forward_step_func(forward_step_func: Callable[..., Any], state: Any) -> Callable[..., Any]:
    """Return a step that the schedules can call as `f(data_iterator, model)`. Prepare it once, use it in every step."""
    return maybe_inject_state(forward_step_func, state, needs_global_state_injection(forward_step_func))


def needs_global_state_injection(forward_step_func: Callable[..., Any]) -> bool:
    """Return whether a function, functor or partial requests the GlobalState and has not been given it yet.

    It does if any parameter is annotated with GlobalState, alone, in a union or as a string, or if the first one is
    called `state` or `global_state`. `*args` and `**kwargs` request nothing.
    """
    return _state_parameter(forward_step_func) is not None


def maybe_inject_state(
    forward_step_func: Callable[..., Any], state: Any, needs_injection: bool | None = None
) -> Callable[..., Any]:
    """Return the forward step with `state` bound, or the same object if nothing is bound.

    needs_injection: True binds the state in any case, as first argument if no parameter requests it; False never
    does; None inspects the signature.

    Raises TypeError: the parameter is in the position of the data iterator or the model.
    """
    if needs_injection is None:
        needs_injection = needs_global_state_injection(forward_step_func)
    if not needs_injection:
        return forward_step_func
    found = _state_parameter(forward_step_func)
    if found is None or found[0] == 0:
        return partial(forward_step_func, state)
    position, parameter = found
    is_in_the_way = parameter.kind is not inspect.Parameter.KEYWORD_ONLY and position < _PASSED_BY_SCHEDULE
    if is_in_the_way or parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise TypeError(
            f"forward step: parameter {parameter.name!r} takes the {_STATE} but stands at position {position + 1},"
            " that cannot be bound by name; make it the first parameter"
        )
    return partial(forward_step_func, **{parameter.name: state})


def _state_parameter(function: Callable[..., Any]) -> tuple[int, inspect.Parameter] | None:
    """Return the parameter that requests the state, and its position (not 0 for a keyword-only parameter)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    bound = function.keywords if isinstance(function, partial) else {}  # a signature still shows these
    named = [(i, p) for i, p in enumerate(parameters) if p.kind not in _VARIADIC and p.name not in bound]
    for position, parameter in named:
        if _means_state(parameter.annotation):
            is_keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            return (max(position, _PASSED_BY_SCHEDULE) if is_keyword_only else position), parameter
    if named and named[0][0] == 0 and named[0][1].name in _STATE_NAMES:
        parameter = named[0][1]
        return (_PASSED_BY_SCHEDULE if parameter.kind is inspect.Parameter.KEYWORD_ONLY else 0), parameter
    return None


def _means_state(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return _STATE in annotation
    if isinstance(annotation, ForwardRef):
        return _STATE in annotation.__forward_arg__
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(_means_state(part) for part in get_args(annotation))
    return getattr(annotation, "__name__", None) == _STATE


def with_own_reports(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward step whose loss function reports copies of values that share the loss's memory.

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
