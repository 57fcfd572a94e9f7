"""The forward step of GPT pre-training."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from cloudai_mbridge.training.losses import masked_next_token_loss


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]], model: Any
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run one micro-batch forward; the returned function turns the last stage's output into the loss."""
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(masked_next_token_loss, batch["loss_mask"])
