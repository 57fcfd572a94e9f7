"""A decoder of attention and MLP layers, and its multi-token prediction. Training FLOPs per token."""

from typing import Any

from cloudai_mbridge.training.flops.attention import full_context, grouped_query, latent, window_context
from cloudai_mbridge.training.flops.compressed_attention import compressed_sparse
from cloudai_mbridge.training.flops.formula import Formula
from cloudai_mbridge.training.flops.layers import count_layers, has_window, window_of
from cloudai_mbridge.training.flops.linear_attention import with_linear_layers
from cloudai_mbridge.training.flops.mlp import dense_mlp, experts, logits, prediction_entry, projections
from cloudai_mbridge.training.flops.quantities import Cost, Lengths, read
from cloudai_mbridge.training.flops.sparse_attention import sparse_latent


def transformer(model: Any, lengths: Lengths, formula: Formula, mtp: int) -> Cost:
    """The whole model. Prediction layers are further layers of the last one's kind."""
    dense, moe = count_layers(model, mtp)
    num_projections = projections(model, formula)
    cost = attention(model, lengths, formula, mtp) + prediction_entry(model) * mtp + logits(model, mtp)
    if dense:
        cost += dense_mlp(model, num_projections) * dense
    if moe:
        cost += experts(model, num_projections) * moe
    return cost


def attention(model: Any, lengths: Lengths, formula: Formula, mtp: int) -> Cost:
    """The attention of all layers, whatever its kind."""
    if not read(model, "multi_latent_attention", False):
        standard = _grouped_query_layers(model, lengths, formula, mtp)
    elif (variant := read(model, "experimental_attention_variant")) == "dsv4_hybrid":
        standard = compressed_sparse(model, lengths, mtp)
    elif variant == "dsa":
        standard = sparse_latent(model, lengths, mtp)
    else:
        standard = latent(model, lengths) * (model.num_layers + mtp)
    return with_linear_layers(model, standard, mtp)


def _grouped_query_layers(model: Any, lengths: Lengths, formula: Formula, mtp: int) -> Cost:
    layers: int = model.num_layers + mtp
    window = window_of(model)
    full = grouped_query(model, full_context(lengths))
    if window is None or not formula.counts_windows:
        return full * layers
    windowed = sum(has_window(model, number) for number in range(1, layers + 1))
    return full * (layers - windowed) + grouped_query(model, window_context(window, lengths)) * windowed
