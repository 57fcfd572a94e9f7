"""Loss functions handed to Megatron's schedules."""

import torch


def masked_next_token_loss(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor, check_for_nan_in_loss: bool = True
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the per-token losses where the mask is set.

    Args:
        loss_mask: [b, s], 1 where a token counts.
        output_tensor: [b, s] cross entropy per token.
        check_for_nan_in_loss: raise when the sum is not finite, on the rank that sees it.

    Returns:
        The loss sum, the number of tokens counted (int), and `{"lm loss": [sum, tokens]}` for reporting.

    Raises:
        FloatingPointError: the loss is NaN or infinite.
    """
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output_tensor.float().reshape(-1) * mask)
    tokens = mask.sum()
    if check_for_nan_in_loss and not bool(torch.isfinite(loss)):
        raise FloatingPointError(f"the loss of a micro-batch is {loss.item()} over {int(tokens)} tokens")
    return loss, tokens.to(torch.int), {"lm loss": torch.stack([loss.detach(), tokens.detach()])}
