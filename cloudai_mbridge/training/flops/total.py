"""FLOPs of a token by the name of the formula: MLPs, experts, output layer, hybrids, vision, a batch."""

from collections import Counter
from typing import Any

from cloudai_mbridge.training.flops.attention import (
    compressed_sparse,
    gated_delta_net,
    grouped_query_layers,
    latent,
    sparse_latent,
    with_linear_layers,
)
from cloudai_mbridge.training.flops.quantities import (
    NEW,
    Cost,
    Formula,
    Lengths,
    count_layers,
    padded_vocab_size,
    query_groups,
    read,
)

SYMBOLS = "M*-EG"
_ESTIMATOR = "_get_num_floating_point_operations"  # of a model


def projections(model: Any, formula: Formula = Formula.NEW) -> int:
    """Return the matrices of an MLP: up and down, and one more for the gate."""
    if not read(model, "gated_linear_unit", False):
        return 2
    # a recipe names the activation, a Megatron config holds the function or module
    activation = read(model, "activation") or read(model, "activation_func")
    named = activation if isinstance(activation, str) else getattr(activation, "__name__", type(activation).__name__)
    return 3 if formula is Formula.NEW or named.lower() in ("silu", "swish") else 2


def _dense_mlp(model: Any, formula: Formula = Formula.NEW) -> Cost:
    return Cost(6 * projections(model, formula) * model.hidden_size * model.ffn_hidden_size)


def _experts(model: Any, formula: Formula = Formula.NEW) -> Cost:
    """One layer's experts: routed experts of a token, and the shared expert. The router is not counted.

    With a latent size the routed experts work at that width, and a projection leads there and back.
    """
    h, latent = model.hidden_size, read(model, "moe_latent_size")
    width, num_projections = read(model, "moe_ffn_hidden_size", model.ffn_hidden_size), projections(model, formula)
    routed = 6 * num_projections * (h if latent is None else latent) * width * read(model, "moe_router_topk", 1)
    shared = 6 * num_projections * h * read(model, "moe_shared_expert_intermediate_size", 0)
    return Cost(routed + shared + (0 if latent is None else 12 * h * latent))


def _logits(model: Any, mtp: int) -> Cost:
    """The output layer over the padded vocabulary, once more for every multi-token-prediction layer."""
    return Cost(6 * model.hidden_size * padded_vocab_size(model) * (1 + mtp))


def parse_pattern(text: str) -> tuple[str, list[str]]:
    """Return the decoder's symbols in a pattern such as `M*-M|ME/*E`, and those of each multi-token-prediction block.

    `M` Mamba, `*` attention (without an MLP), `-` MLP, `E` MoE, `G` Gated DeltaNet; `|` separates pipeline stages, `/`
    begins a block of multi-token prediction. Raises ValueError: it has other symbols.
    """
    if unknown := sorted(set(text) - set(SYMBOLS + "|/")):
        raise ValueError(f"hybrid_layer_pattern: {unknown} are not layers; use {', '.join(SYMBOLS)}, | and /")
    decoder, *prediction = text.replace("|", "").split("/")
    return decoder, prediction


def _hybrid(model: Any, lengths: Lengths, formula: Formula, mtp: int | None) -> Cost:
    """The whole model. mtp: number of multi-token-prediction blocks, instead of the pattern's; None: as configured."""
    if text := read(model, "hybrid_layer_pattern") or read(model, "hybrid_override_pattern"):
        decoder, prediction = parse_pattern(text)
    else:  # `hybrid_attention_ratio` and `hybrid_mlp_ratio` divide the layers
        layers, prediction = int(model.num_layers), []
        num_attention = round(layers * read(model, "hybrid_attention_ratio", 0))
        num_mlp = round(layers * read(model, "hybrid_mlp_ratio", 0))
        decoder = "*" * num_attention + "-" * num_mlp + "M" * (layers - num_attention - num_mlp)
    depths = read(model, "mtp_num_layers", len(prediction)) if mtp is None else mtp
    if mtp is not None:
        prediction = prediction[:1] * mtp
    count = Counter("".join([decoder, *prediction]))
    # prediction blocks always attend to everything, and the output gate is not counted
    windowed = [number for number, symbol in enumerate(decoder, 1) if symbol == "*"]
    attention = grouped_query_layers(model, lengths, formula, count["*"], windowed, with_gate=False)
    cost = attention + _logits(model, depths)
    for symbol, block in (("-", _dense_mlp), ("E", _experts), ("M", _mamba), ("G", gated_delta_net)):
        if count[symbol]:
            cost += block(model) * count[symbol]
    return cost


def _mamba(model: Any) -> Cost:
    """One Mamba-2 layer (arXiv 2405.21060).

    The inner width is 2h as in the reference, whatever `mamba_num_heads` x `mamba_head_dim` is (see docs/models.md).
    """
    h, state = model.hidden_size, read(model, "mamba_state_dim", 128)
    inner = 2 * h
    heads = read(model, "mamba_num_heads") or inner // read(model, "mamba_head_dim", 64)
    projected = 2 * inner + 2 * read(model, "mamba_num_groups", 8) * state + heads
    return Cost(6 * h * projected + 6 * inner * h, 21 * inner * state)


def flops_per_token(
    model: Any,
    formula: str = NEW,
    *,
    seq_length: Any = None,
    mtp_num_layers: int | None = None,
    frozen: bool = False,
    adapter_weights: int = 0,
) -> int:
    """Return the model FLOPs to train on one token of a full sequence.

    model: anything with Megatron's field names. seq_length, mtp_num_layers: None takes the model's. frozen: only
    adapters are trained (LoRA), with `adapter_weights` weights per token, which saves the weight gradients.
    """
    lengths = Lengths.fixed(model.seq_length if seq_length is None else seq_length)
    cost = cost_per_token(model, lengths, formula, mtp_num_layers)
    return _whole((cost.frozen if frozen else cost.total) + 6 * adapter_weights)


def cost_per_token(model: Any, lengths: Lengths, formula: str = NEW, mtp_num_layers: int | None = None) -> Cost:
    """Return the same in its parts. The lengths may hold numpy arrays; the parts are arrays then."""
    kind = Formula(formula)
    # a model with whole transformer layers for `*` is none
    has_pattern = read(model, "is_hybrid_model", False) or read(model, "hybrid_layer_pattern")
    if has_pattern and not read(model, "hybrid_attention_layers_include_mlp", False):
        return _hybrid(model, lengths, kind, mtp_num_layers)
    mtp = int(read(model, "mtp_num_layers", 0)) if mtp_num_layers is None else mtp_num_layers
    return _transformer(model, lengths, kind, mtp)


def num_floating_point_operations(
    cfg: Any,
    batch_size: int = 1,
    seqlen_sum: int | None = None,
    seqlen_squared_sum: int | None = None,
    num_vision_patches: int = 0,
    cross_seqlen_sum: int | None = None,
    cross_seqlen_product_sum: int | None = None,
    *,
    formula: str = NEW,
) -> int:
    """Return the model FLOPs to train on a batch.

    cfg: a training configuration; its `model` and `peft` are read. seqlen_sum, seqlen_squared_sum: sums over the real
    sequences of the batch; None: full sequences of `model.seq_length`. An empty batch costs nothing.
    num_vision_patches: of the batch, taken as one equal image per sample. cross_*: for estimators of models with cross
    attention.

    A model's own estimator takes precedence, unless LoRA is trained.
    """
    model = cfg.model
    is_lora = any(kind.__name__ == "LoRA" for kind in type(getattr(cfg, "peft", None)).__mro__)
    if not is_lora and (estimator := getattr(model, f"{_ESTIMATOR}_with_runtime_stats", None)):
        return _whole(
            estimator(
                batch_size=batch_size,
                seqlen_sum=seqlen_sum,
                seqlen_squared_sum=seqlen_squared_sum,
                cross_seqlen_sum=cross_seqlen_sum,
                cross_seqlen_product_sum=cross_seqlen_product_sum,
            )
        )
    if not is_lora and (estimator := getattr(model, _ESTIMATOR, None)):
        return _whole(estimator(batch_size))
    lengths = Lengths.of_batch(batch_size, model.seq_length, seqlen_sum, seqlen_squared_sum)
    vision = _vision_flops(model, batch_size, num_vision_patches) if num_vision_patches > 0 else 0
    return _whole(cost_per_token(model, lengths, formula).total * lengths.tokens) + _whole(vision)


def _whole(flops: Any) -> int:
    return flops if isinstance(flops, int) else round(flops)


def _transformer(model: Any, lengths: Lengths, formula: Formula, mtp: int) -> Cost:
    """The whole model. Prediction layers are further layers of the last one's kind."""
    layers: int = model.num_layers + mtp
    if not read(model, "multi_latent_attention", False):
        attention = grouped_query_layers(model, lengths, formula, layers, range(1, layers + 1))
    elif (variant := read(model, "experimental_attention_variant")) == "dsv4_hybrid":
        attention = compressed_sparse(model, lengths, mtp)
    elif variant == "dsa":
        attention = sparse_latent(model, lengths, mtp)
    else:
        attention = latent(model, lengths) * layers
    h, (dense, moe) = model.hidden_size, count_layers(model, mtp)
    # a prediction layer adds three norms and a projection from 2h to h
    prediction = Cost(6 * (3 * h + 2 * h * h)) * mtp
    cost = with_linear_layers(model, attention, mtp) + prediction + _logits(model, mtp)
    if dense:
        cost += _dense_mlp(model, formula) * dense
    if moe:
        cost += _experts(model, formula) * moe
    return cost


def _vision_flops(model: Any, batch_size: int, patches: int) -> Any:
    """Return a batch's training FLOPs of the vision transformer and its patch mergers; 0 without them.

    patches: of the batch, before merging, taken as one image per sample, all equal. Attention, within an image, is not
    causal.
    """
    thinker = read(model, "thinker_config")
    vision = read(model, "vision_config") or read(thinker, "vision_config")
    if vision is None:
        return 0
    of_image = patches / batch_size if batch_size > 0 else patches
    total, squared = batch_size * of_image, batch_size * of_image**2
    h, depth, width = (read(vision, name, 0) for name in ("hidden_size", "depth", "intermediate_size"))
    layers = depth * ((8 * h**2 + 4 * h * width) * total + 4 * h * squared)
    merge = read(vision, "spatial_merge_size", 2) ** 2
    merged, out = h * merge, read(vision, "out_hidden_size", model.hidden_size)
    indexes = (read(owner, "deepstack_visual_indexes") for owner in (vision, model, thinker))
    further_levels = next((len(each) for each in indexes if each is not None), 0)  # of the tower, merged too
    mergers = (1 + further_levels) * (batch_size * (of_image // merge)) * (2 * merged**2 + 2 * merged * out)
    return 3 * (layers + mergers)


def lora_flops_per_sample(model: Any, tokens: Any, squared: Any = 0) -> Any:
    """Return the reference's training FLOPs of one packed sample of Llama 3 70B with LoRA.

    Frozen weights cost 4 per token. The vocabulary is not padded; attention is counted as if it were not causal.
    """
    h, layers = model.hidden_size, model.num_layers
    per_layer = 12 + 12 * query_groups(model) / model.num_attention_heads + 18 * model.ffn_hidden_size / h
    frozen = tokens * layers * h**2 * (per_layer + 6 * model.vocab_size / (layers * h))
    return frozen * 2 / 3 + 12 * layers * h * squared
