"""Emulation of Transformer Engine's kernels for experts: router, auxiliary loss, padding; and those in Triton, which
permute the tokens."""
# ruff: noqa: N803

from collections.abc import Sequence
from typing import Any

import torch

Maybe = torch.Tensor | None


def fused_topk_with_score_function_fwd(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Maybe,
    routing_map_format: int = 0,
    topk_indices: Maybe = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return probabilities [tokens, experts], the routing map, and the logits in fp32 for the backward pass."""
    assert routing_map_format == 0, "not emulated"
    assert topk_indices is None, "not emulated"
    values = logits.detach().float()
    scores = values if score_function == "softmax" and not use_pre_softmax else _score(values, score_function)
    scores = scores if expert_bias is None else scores + expert_bias
    if group_topk:
        scores = _within_groups(scores, topk, num_groups or 1, group_topk)
    routing_map = torch.zeros_like(values, dtype=torch.bool).scatter(1, scores.topk(topk, 1).indices, True)
    probabilities = _probabilities(values, routing_map, topk, use_pre_softmax, scaling_factor, score_function)
    return probabilities.to(logits.dtype), routing_map, values


def fused_topk_with_score_function_bwd(
    routing_map: torch.Tensor,
    intermediate_output: torch.Tensor,
    grad_probs: torch.Tensor,
    grad_logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    use_dense_indices: bool = False,
    routing_map_format: int = 0,
) -> None:
    """Write the gradient of the logits."""
    with torch.enable_grad():
        leaf = intermediate_output.detach().requires_grad_()
        made = _probabilities(leaf, routing_map, topk, use_pre_softmax, scaling_factor, score_function)
        grad_logits.copy_(torch.autograd.grad(made, leaf, grad_probs.float())[0])


def fused_score_for_moe_aux_loss_fwd(
    logits: torch.Tensor, topk: int, score_function: str, routing_map_format: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the normalized scores, the routing map without a bias, and the logits in fp32."""
    values = logits.detach().float()
    scores = _normalized_scores(values, score_function)
    routing_map = torch.zeros_like(values, dtype=torch.bool).scatter(1, scores.topk(topk, 1).indices, True)
    return scores, routing_map, values


def fused_score_for_moe_aux_loss_bwd(
    intermediate_output: torch.Tensor,
    grad_scores: torch.Tensor,
    grad_logits: torch.Tensor,
    topk: int,
    score_function: str,
) -> None:
    """Write the gradient of the logits."""
    with torch.enable_grad():
        leaf = intermediate_output.detach().requires_grad_()
        made = _normalized_scores(leaf, score_function)
        grad_logits.copy_(torch.autograd.grad(made, leaf, grad_scores.float())[0])


def fused_moe_aux_loss_fwd(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the auxiliary loss and its factor."""
    total = float(total_num_tokens)
    factor = torch.tensor(num_experts * coeff / topk / total / total)
    loss = (probs.float().sum(0) * tokens_per_expert.float()).sum() * factor
    return loss.to(probs.dtype), factor


fused_moe_aux_loss_fwd_graph_safe = fused_moe_aux_loss_fwd


def fused_moe_aux_loss_bwd(
    Const_buf: torch.Tensor, tokens_per_expert: torch.Tensor, num_rows: int, num_cols: int, grad_aux_loss: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the probabilities."""
    one = grad_aux_loss.float() * Const_buf * tokens_per_expert.float()
    return one.expand(num_rows, num_cols).to(grad_aux_loss.dtype).contiguous()


def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, sizes: Sequence[int], padded: Sequence[int]
) -> None:
    """Copy each expert's rows to the start of its larger block of zeros."""
    output.zero_()
    for source, target in zip(input.split(list(sizes)), output.split(list(padded)), strict=True):
        target[: len(source)].copy_(source)


def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, padded: Sequence[int], sizes: Sequence[int]
) -> None:
    """Copy each expert's rows back."""
    for source, target in zip(input.split(list(padded)), output.split(list(sizes)), strict=True):
        target.copy_(source[: len(target)])


def _score(logits: torch.Tensor, function: str) -> torch.Tensor:
    if function == "softmax":
        return torch.softmax(logits, -1)
    if function == "sigmoid":
        return torch.sigmoid(logits)
    return torch.nn.functional.softplus(logits).sqrt()


def _normalized_scores(logits: torch.Tensor, function: str) -> torch.Tensor:
    scores = _score(logits, function)
    return scores if function == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _probabilities(
    logits: torch.Tensor, routing_map: torch.Tensor, topk: int, is_pre: bool, factor: float | None, function: str
) -> torch.Tensor:
    if function == "softmax" and not is_pre:
        made = torch.softmax(logits.masked_fill(~routing_map, -torch.inf), -1)
    else:
        made = _score(logits, function) * routing_map
        if function != "softmax" and topk > 1:
            made = made / (made.sum(-1, keepdim=True) + 1e-20)
    return made * (factor or 1.0)


def _within_groups(scores: torch.Tensor, topk: int, groups: int, group_topk: int) -> torch.Tensor:
    by_group = scores.view(len(scores), groups, -1)
    best = by_group.topk(topk // group_topk, -1).values.sum(-1).topk(group_topk, -1).indices
    taken = torch.zeros(len(scores), groups, dtype=torch.bool).scatter(1, best, True)
    return by_group.masked_fill(~taken[..., None], -torch.inf).flatten(1)


class Triton:
    """Emulation of the wrappers in `transformer_engine.pytorch.triton.permutation`.

    The map from tokens to rows is kept in a plainer form than the kernels': [tokens, experts] with the row or -1.
    """

    @staticmethod
    def make_row_id_map(routing_map: torch.Tensor, num_tokens: int, num_experts: int) -> torch.Tensor:
        """Return the row of each token at each expert; experts one after the other, tokens in order."""
        by_expert = routing_map.T.bool().flatten()
        rows = by_expert.cumsum(0) - 1
        return torch.where(by_expert, rows, -1).view(num_experts, num_tokens).T.int().contiguous()

    @staticmethod
    def permute_with_mask_map(
        inp: torch.Tensor,
        row_id_map: torch.Tensor,
        probs: Maybe,
        scale: Maybe,
        pad_offsets: Maybe,
        num_tokens: int,
        num_experts: int,
        num_out_tokens: int,
        hidden_size: int,
        scale_hidden_dim: int | None,
    ) -> tuple[torch.Tensor, Maybe, Maybe]:
        """Return the tokens by expert, their scales and probabilities."""
        token, expert, row = _places(row_id_map, pad_offsets)
        output = inp.new_zeros(num_out_tokens, hidden_size).index_copy(0, row, inp[token])
        scales = None
        if scale is not None:
            scales = scale.new_zeros(num_out_tokens, scale.shape[1]).index_copy(0, row, scale[token])
        if probs is None:
            return output, scales, None
        chosen = probs[token] if probs.dim() == 1 else probs[token, expert]
        return output, scales, probs.new_zeros(num_out_tokens).index_copy(0, row, chosen)

    @staticmethod
    def unpermute_with_mask_map(
        inp: torch.Tensor,
        row_id_map: torch.Tensor,
        merging_probs: Maybe,
        permuted_probs: Maybe,
        pad_offsets: Maybe,
        num_tokens: int,
        num_experts: int,
        hidden_size: int,
    ) -> tuple[torch.Tensor, Maybe]:
        """Return the sum of each token's rows, weighted if wanted, and the probabilities by token and expert."""
        token, expert, row = _places(row_id_map, pad_offsets)
        rows = inp[row].float()
        if merging_probs is not None:
            rows = rows * merging_probs[token, expert, None].float()
        output = torch.zeros(num_tokens, hidden_size).index_add(0, token, rows).to(inp.dtype)
        if permuted_probs is None:
            return output, None
        made = permuted_probs.new_zeros(num_tokens, num_experts)
        made[token, expert] = permuted_probs[row]
        return output, made

    @staticmethod
    def unpermute_with_mask_map_bwd_with_merging_probs(
        fwd_output_grad: torch.Tensor,
        row_id_map: torch.Tensor,
        fwd_input: torch.Tensor,
        merging_probs: torch.Tensor,
        pad_offsets: Maybe,
        num_tokens: int,
        num_experts: int,
        num_out_tokens: int,
        hidden_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of the rows and of the weights."""
        token, expert, row = _places(row_id_map, pad_offsets)
        gradient = fwd_output_grad[token].float()
        rows = gradient * merging_probs[token, expert, None].float()
        made = torch.zeros(num_out_tokens, hidden_size).index_copy(0, row, rows).to(fwd_output_grad.dtype)
        weights = torch.zeros_like(merging_probs)
        weights[token, expert] = (gradient * fwd_input[row].float()).sum(-1).to(weights.dtype)
        return made, weights

    @staticmethod
    def make_chunk_sort_map(
        split_sizes: torch.Tensor, sorted_indices: torch.Tensor, num_tokens: int, num_splits: int
    ) -> torch.Tensor:
        """Return where each row goes when the chunks are put in this order."""
        chunks = torch.arange(num_tokens).split(split_sizes.tolist())
        order = torch.cat([chunks[index] for index in sorted_indices.tolist()])
        return torch.empty(num_tokens, dtype=torch.int32).index_copy(0, order, torch.arange(num_tokens).int())

    @staticmethod
    def sort_chunks_by_map(
        inp: torch.Tensor, row_id_map: torch.Tensor, probs: Maybe, num_tokens: int, hidden_size: int, is_forward: bool
    ) -> tuple[torch.Tensor, Maybe]:
        """Return rows and probabilities in the new order, or backward in the old one."""
        to = row_id_map.long()
        back = torch.empty_like(to).index_copy(0, to, torch.arange(num_tokens))
        take: Any = back if is_forward else to
        return inp[take], None if probs is None else probs[take]


def _places(row_id_map: torch.Tensor, pad_offsets: Maybe) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token, expert and row of each copy of a token."""
    token, expert = torch.nonzero(row_id_map >= 0, as_tuple=True)
    row = row_id_map[token, expert].long()
    return token, expert, row if pad_offsets is None else row + pad_offsets[expert].long()
