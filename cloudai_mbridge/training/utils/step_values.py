"""The values of one finished step, as the parts of its report share them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class StepValues:
    """What the loop knows after a step; batch_size is in sequences over all ranks, history in seconds."""

    losses: dict[str, torch.Tensor]  # on the last pipeline stage only
    learning_rate: float | None
    decoupled_learning_rate: float | None
    loss_scale: float
    grad_norm: float | None
    params_norm: float | None
    num_zeros: int | None
    max_attention_logit: float | None
    batch_size: int
    seq_length: int
    history: Sequence[float] | None
    model: list[Any]
