"""Linear attention: Gated DeltaNet (arXiv 2412.06464), its second version, Kimi Delta Attention. FLOPs per token."""

from typing import Any

from cloudai_mbridge.training.flops.layers import linear_attention_pattern, with_prediction
from cloudai_mbridge.training.flops.quantities import Cost, read

GATED_DELTA_NET = ("gated_delta_net", "gdn", "gdn2")


def gated_delta_net(model: Any) -> Cost:
    """One layer: projections in and out, short convolutions, and the recurrence over a d x d state per value head."""
    h = model.hidden_size
    key_dim, value_dim = read(model, "linear_key_head_dim", 128), read(model, "linear_value_head_dim", 128)
    value_heads = read(model, "linear_num_value_heads", 32)
    qk, v = key_dim * read(model, "linear_num_key_heads", 16), value_dim * value_heads
    is_second = read(model, "experimental_attention_variant") == "gdn2"
    projected = 4 * qk + 3 * v if is_second else 2 * qk + 2 * v + 2 * value_heads
    convolution = read(model, "linear_conv_kernel_dim", 4) * (2 * qk + v)
    return Cost(6 * (h * projected + h * v), 6 * (convolution + 4 * value_heads * value_dim**2))


def kimi_delta(model: Any) -> Cost:
    """One layer of Kimi Delta Attention.

    Five projections of the full width, the per-head beta, the low-rank forget gate, convolutions, the recurrence.
    """
    h, dim, heads = model.hidden_size, model.kimi_linear_head_dim, model.kimi_linear_num_heads
    width = heads * dim
    weights = 5 * h * width + h * heads + h * dim + dim * width
    return Cost(6 * weights, 6 * (3 * model.kimi_linear_conv_kernel_size * width + 4 * heads * dim**2))


def with_linear_layers(model: Any, attention: Cost, mtp: int) -> Cost:
    """Return the cost of all layers; some have linear attention in place of their share of `attention`.

    Raises ValueError: the pattern of layers does not fit the model. TypeError: it is neither a number nor a list.
    """
    layers = model.num_layers + mtp
    if read(model, "experimental_attention_variant") in GATED_DELTA_NET:
        replaced = with_prediction(linear_attention_pattern(model), mtp)
        attention = _replace(attention, gated_delta_net(model), replaced, layers)
    if numbers := set(read(model, "kimi_kda_layers", ())):
        if outside := sorted(number for number in numbers if not 0 < number <= model.num_layers):
            raise ValueError(f"kimi_kda_layers has {outside}; layers are numbered from 1 to {model.num_layers}")
        replaced = len(numbers) + (mtp if model.num_layers in numbers else 0)
        attention = _replace(attention, kimi_delta(model), replaced, layers)
    return attention


def _replace(attention: Cost, linear: Cost, replaced: int, layers: int) -> Cost:
    return linear * replaced + attention / layers * (layers - replaced)
