"""Loss functions handed to Megatron's schedules."""

from functools import partial

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine

SPIKY_LOSS_FACTOR = 10.0  # a rerun machine may carry another one, as `spiky_loss_factor`


def masked_next_token_loss(
    loss_mask: torch.Tensor,
    output_tensor: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    check_for_nan_in_loss: bool = True,
    check_for_spiky_loss: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the per-token losses under the mask: the token-aware pattern of Megatron's schedules.

    Args:
        loss_mask: [b, s], 1 for tokens that count.
        output_tensor: [b, s] cross entropy per token; or a pair of it and the mask to use instead of `loss_mask`.
        check_for_nan_in_loss: let Megatron's rerun machine refuse a sum that is NaN or infinite.
        check_for_spiky_loss: let it report a sum that is unexpectedly large.

    Returns:
        The loss sum, the number of tokens counted (int), and `{"lm loss": [sum, tokens]}` for reporting.

    RuntimeError: the loss is NaN or infinite and the rerun machine is disabled; an enabled one runs the step again.
    """
    losses, mask = output_tensor if isinstance(output_tensor, tuple) else (output_tensor, loss_mask)
    mask = mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum()
    if check_for_nan_in_loss or check_for_spiky_loss:
        machine = get_rerun_state_machine()
        on_host = loss.detach().cpu()  # the machine waits for the device in every check: one wait, not three
        if check_for_nan_in_loss:
            machine.validate_result(on_host, torch.isnan, "found NaN in local forward loss calculation", fatal=True)
            machine.validate_result(on_host, torch.isinf, "found Inf in local forward loss calculation", fatal=True)
        if check_for_spiky_loss:
            factor = getattr(machine, "spiky_loss_factor", SPIKY_LOSS_FACTOR)
            is_spiky = partial(machine.is_unexpectedly_large, threshold=factor, context="loss")
            machine.validate_result(on_host, is_spiky, "Spiky loss", fatal=False)
    return loss, tokens.to(torch.int), {"lm loss": torch.stack([loss.detach(), tokens.detach()])}


masked_token_loss = masked_next_token_loss


def create_masked_next_token_loss_function(
    loss_mask: torch.Tensor, check_for_nan_in_loss: bool, check_for_spiky_loss: bool
) -> "partial[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]":
    """Return `masked_next_token_loss` with all but the model's output bound, the second result of a forward step."""
    return partial(
        masked_next_token_loss,
        loss_mask,
        check_for_nan_in_loss=check_for_nan_in_loss,
        check_for_spiky_loss=check_for_spiky_loss,
    )
