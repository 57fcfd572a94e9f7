"""FLOPs of a token and of a batch, by the formula's name."""

from typing import Any

from cloudai_mbridge.training.flops.attention import grouped_query_layers, latent
from cloudai_mbridge.training.flops.hybrid import hybrid, is_hybrid
from cloudai_mbridge.training.flops.layers import count_layers, mtp_layers
from cloudai_mbridge.training.flops.linear_attention import with_linear_layers
from cloudai_mbridge.training.flops.lora import PackedSamples, has_special_rule, is_lora, lora_flops_per_sample
from cloudai_mbridge.training.flops.mlp import dense_mlp, experts, logits, prediction_entry, projections
from cloudai_mbridge.training.flops.quantities import NEW, Cost, Formula, Lengths, read
from cloudai_mbridge.training.flops.sparse_attention import compressed_sparse, sparse_latent
from cloudai_mbridge.training.flops.vision import VisionPatches, equal_images, vit_flops

_WITH_STATISTICS = "_get_num_floating_point_operations_with_runtime_stats"
_OF_BATCH = "_get_num_floating_point_operations"


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
    if is_hybrid(model):
        return hybrid(model, lengths, kind, mtp_num_layers)
    return transformer(model, lengths, kind, mtp_layers(model) if mtp_num_layers is None else mtp_num_layers)


def num_floating_point_operations(
    cfg: Any,
    batch_size: int = 1,
    seqlen_sum: int | None = None,
    seqlen_squared_sum: int | None = None,
    num_vision_patches: int = 0,
    cross_seqlen_sum: int | None = None,
    cross_seqlen_product_sum: int | None = None,
    *,
    vision_patches: VisionPatches | None = None,
    packed_samples: PackedSamples | None = None,
    formula: str = NEW,
) -> int:
    """Return the model FLOPs to train on a batch.

    cfg: a training configuration; its `model`, and for LoRA its `peft` and `dataset`, are read. seqlen_sum,
    seqlen_squared_sum: sums over the real sequences of the batch; None: full sequences of `model.seq_length`. An empty
    batch costs nothing. num_vision_patches: of the batch, taken as one equal image per sample; `vision_patches` is
    exact instead. cross_*: for estimators of models with cross attention. packed_samples: averages of the packed
    data; with them, runs that the reference counts by its rule for LoRA are counted so.

    A model's own estimator takes precedence, unless LoRA is trained.
    """
    model = cfg.model
    if not is_lora(cfg) and (estimator := getattr(model, _WITH_STATISTICS, None)):
        return _whole(
            estimator(
                batch_size=batch_size,
                seqlen_sum=seqlen_sum,
                seqlen_squared_sum=seqlen_squared_sum,
                cross_seqlen_sum=cross_seqlen_sum,
                cross_seqlen_product_sum=cross_seqlen_product_sum,
            )
        )
    if not is_lora(cfg) and (estimator := getattr(model, _OF_BATCH, None)):
        return _whole(estimator(batch_size))
    if packed_samples is not None and not is_hybrid(model) and has_special_rule(cfg):
        return _whole(batch_size * lora_flops_per_sample(model, packed_samples.tokens, packed_samples.squared))
    lengths = Lengths.of_batch(batch_size, model.seq_length, seqlen_sum, seqlen_squared_sum)
    if vision_patches is None and num_vision_patches > 0:
        vision_patches = equal_images(model, batch_size, num_vision_patches)
    vision = 0 if vision_patches is None else vit_flops(model, vision_patches)
    return _whole(cost_per_token(model, lengths, formula).total * lengths.tokens) + _whole(vision)


def _whole(flops: Any) -> int:
    return flops if isinstance(flops, int) else round(flops)


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
    layers: int = model.num_layers + mtp
    if not read(model, "multi_latent_attention", False):
        standard = grouped_query_layers(model, lengths, formula, layers, range(1, layers + 1))
    elif (variant := read(model, "experimental_attention_variant")) == "dsv4_hybrid":
        standard = compressed_sparse(model, lengths, mtp)
    elif variant == "dsa":
        standard = sparse_latent(model, lengths, mtp)
    else:
        standard = latent(model, lengths) * layers
    return with_linear_layers(model, standard, mtp)
