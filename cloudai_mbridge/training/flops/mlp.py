"""MLPs, experts, the output layer and the entry of multi-token prediction. Training FLOPs per token."""

from typing import Any

from cloudai_mbridge.training.flops.quantities import Cost, Formula, padded_vocab_size, read


def projections(model: Any, formula: Formula = Formula.NEW) -> int:
    """Return the matrices of an MLP: up and down, and one more for the gate."""
    is_gated = bool(read(model, "gated_linear_unit", False))
    return 3 if is_gated and (formula is Formula.NEW or _is_silu(model)) else 2


def dense_mlp(model: Any, num_projections: int) -> Cost:
    """One dense MLP."""
    return Cost(6 * num_projections * model.hidden_size * model.ffn_hidden_size)


def experts(model: Any, num_projections: int) -> Cost:
    """One layer's experts: routed experts of a token, and the shared expert. The router is not counted.

    With a latent size the routed experts work at that width, and a projection leads there and back.
    """
    h, latent = model.hidden_size, read(model, "moe_latent_size")
    width = read(model, "moe_ffn_hidden_size", model.ffn_hidden_size)
    routed = 6 * num_projections * (h if latent is None else latent) * width * read(model, "moe_router_topk", 1)
    shared = 6 * num_projections * h * read(model, "moe_shared_expert_intermediate_size", 0)
    return Cost(routed + shared + (0 if latent is None else 12 * h * latent))


def logits(model: Any, mtp: int) -> Cost:
    """The output layer over the padded vocabulary, once more for every multi-token-prediction layer."""
    return Cost(6 * model.hidden_size * padded_vocab_size(model) * (1 + mtp))


def prediction_entry(model: Any) -> Cost:
    """Additions of a multi-token-prediction layer to a decoder layer: three norms, the projection from 2h to h."""
    h = model.hidden_size
    return Cost(6 * (3 * h + 2 * h * h))


def _is_silu(model: Any) -> bool:
    """Return whether the activation is SiLU: a recipe names it, a Megatron config holds the function or module."""
    activation = read(model, "activation") or read(model, "activation_func")
    named = activation if isinstance(activation, str) else getattr(activation, "__name__", type(activation).__name__)
    return named.lower() in ("silu", "swish")
