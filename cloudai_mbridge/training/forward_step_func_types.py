"""Types of forward steps, for annotations; names are those of Megatron-Bridge's module.

A forward step takes (data iterator, model), or the state before them, or `return_schedule_plan` after them, or both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

LossReduced = dict[str, torch.Tensor]
TwoTupleLossReturn = tuple[torch.Tensor, LossReduced]
ThreeTupleLossReturn = tuple[torch.Tensor, torch.Tensor, LossReduced]
InferenceLossReturn = Any
LossFunctionReturn = TwoTupleLossReturn | ThreeTupleLossReturn | InferenceLossReturn
LossFunction = partial[LossFunctionReturn]
ForwardStepResult = tuple[Any, Callable[..., Any]]

TwoArgForwardStep = Callable[[Any, Any], ForwardStepResult]
ThreeArgForwardStep = Callable[[Any, Any, bool], ForwardStepResult]
ThreeArgStateForwardStep = Callable[[Any, Any, Any], ForwardStepResult]
FourArgForwardStep = Callable[[Any, Any, Any, bool], ForwardStepResult]
ForwardStepFunctor = Callable[..., ForwardStepResult]
ForwardStepFunc = TwoArgForwardStep | ThreeArgForwardStep | ThreeArgStateForwardStep | FourArgForwardStep
ForwardStepCallable = ForwardStepFunc | ForwardStepFunctor
