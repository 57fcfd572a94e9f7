"""What the formulas read of a model, from a recipe and a point's arguments; no torch.

Where a value comes from, the later one wins: Megatron-Core's default (below, where the field has one), what all of our
recipes share (`recipes.container.MODEL_DEFAULTS`), the recipe's `[model]` table, the point's arguments (`_ARGUMENTS`),
and `model.*` of its `extra_cmd_args`. A list of one entry per layer is cut or continued where the point has another
number of layers than the recipe.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, get_type_hints

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.model_overrides import model_overrides
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.recipes.container import MODEL_DEFAULTS
from cloudai_mbridge.recipes.load import Recipe

PerLayer = int | tuple[int, ...] | None


@dataclass(frozen=True)
class Architecture:
    """A model, in Megatron-Core's names and with its defaults. Sizes are the whole model's; hashable.

    activation: silu, gelu, quick_gelu, squared_relu. tensor_model_parallel_size: for the padding of the vocabulary.
    mtp_num_layers: 0 where none are trained. csa_*, o_*, dsa_*, linear_*: of attention variants that the formulas know
    and our loop does not build.
    """

    recipe: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    seq_length: int
    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int
    tensor_model_parallel_size: int = 1
    make_vocab_size_divisible_by: int = 128
    should_pad_vocab: bool = False
    share_embeddings_and_output_weights: bool = True
    position_embedding_type: str = "learned_absolute"
    rotary_base: int = 10000
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    gated_linear_unit: bool = False
    activation: str = "gelu"
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    attention_output_gate: bool = False
    softmax_type: str = "vanilla"
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    window_size: int | tuple[int, ...] | None = None
    window_attn_skip_freq: PerLayer = None
    mtp_num_layers: int = 0
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None

    num_moe_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_layer_freq: int | tuple[int, ...] = 1
    moe_latent_size: int | None = None
    moe_router_enable_expert_bias: bool = False
    moe_aux_loss_coeff: float = 0.0
    moe_token_dispatcher_type: str = "allgather"  # noqa: S105 - no password

    multi_latent_attention: bool = False
    q_lora_rank: int | None = 512
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    experimental_attention_variant: str | None = None
    dsa_indexer_n_heads: int | None = None
    dsa_indexer_head_dim: int | None = None
    dsa_indexer_topk: int | None = None
    dsa_indexer_loss_coeff: float | None = None
    dsa_indexer_use_sparse_loss: bool = False
    dsa_indexer_topk_freq: int = 1
    dsa_indexer_skip_topk_offset: int = 0
    o_lora_rank: int = 0
    o_groups: int = 1
    csa_window_size: int = 128
    csa_compress_ratios: tuple[int, ...] | None = None
    linear_attention_freq: PerLayer = None
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    hybrid_layer_pattern: str | None = None
    mamba_num_heads: int | None = None
    mamba_head_dim: int = 64
    mamba_state_dim: int = 128
    mamba_num_groups: int = 8

    @property
    def is_hybrid_model(self) -> bool:
        """Whether a pattern of Mamba, attention, MLP and MoE layers makes the model."""
        return self.hybrid_layer_pattern is not None

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary, rounded up so that every tensor-parallel rank holds an equal, aligned share."""
        if not self.should_pad_vocab:
            return self.vocab_size
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple


_FIRST_DENSE = "first_k_dense_replace"
MODEL_FIELDS = frozenset(field.name for field in fields(Architecture)) - {"recipe"}
# arguments of a point -> fields; the last one says how the layers with experts follow
_ARGUMENTS = {
    "hidden_size": "hidden_size",
    "num_layers": "num_layers",
    "vocab_size": "vocab_size",
    "seq_length": "seq_length",
    "tp": "tensor_model_parallel_size",
    "first_k_dense_replace": _FIRST_DENSE,
}


def architecture(
    recipe: Recipe,
    args: ResolvedCmdArgs | None = None,
    extra: Mapping[str, str] | None = None,
    *,
    mtp_num_layers: int | None = None,
) -> Architecture:
    """Return the model that a point trains.

    extra: the point's `extra_cmd_args`; of these `model.*` counts. mtp_num_layers: None takes the upstream recipe's for
    the upstream launcher, and 0 for the embedded loop, which trains without unless `extra` says otherwise.
    BadInput: `extra` sets a size to something else than the formulas can read.
    """
    given = () if args is None else tuple((name, getattr(args, name)) for name in _ARGUMENTS)
    default_mtp = 0 if args is not None and args.launcher is Launcher.EMBEDDED else recipe.mtp_num_layers
    return _architecture(_RecipeById(recipe), given, tuple((extra or {}).items()), mtp_num_layers, default_mtp)


class _RecipeById:
    """A recipe that hashes by identity: points of a sweep share few architectures, and each is built once."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __hash__(self) -> int:
        return id(self.recipe)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RecipeById) and self.recipe is other.recipe


@lru_cache(maxsize=4096)
def _architecture(
    source: _RecipeById,
    given: tuple[tuple[str, int | None], ...],
    extra: tuple[tuple[str, str], ...],
    mtp_num_layers: int | None,
    default_mtp: int,
) -> Architecture:
    model = {**MODEL_DEFAULTS, "activation": "silu", **source.recipe.sections["model"]}
    model.update({_ARGUMENTS[name]: value for name, value in given if value is not None})
    model.update(model_overrides(dict(extra), _TYPES))
    _check_sizes(source.recipe.name, model)
    dense = model.pop(_FIRST_DENSE, None)
    if dense is not None and model.get("num_moe_experts") is not None:
        model["moe_layer_freq"] = [int(index >= dense) for index in range(model["num_layers"])]
    if mtp_num_layers is not None:
        model["mtp_num_layers"] = mtp_num_layers
    elif model.get("mtp_num_layers") is None:
        model["mtp_num_layers"] = default_mtp
    fit_layers(model)
    _derive(model)
    has_experts = model.get("num_moe_experts") is not None
    known: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in model.items()
        if name in MODEL_FIELDS and (has_experts or not name.startswith("moe_"))
    }
    _check_sizes(source.recipe.name, known)
    return Architecture(recipe=source.recipe.name, **known)


def _check_sizes(recipe: str, model: Mapping[str, Any]) -> None:
    """Raise BadInput if a size is not a positive whole number in range."""
    for name in _SIZES:
        value, least = model.get(name), 0 if name in _MAY_BE_ZERO else 1
        most = _MOST_LAYERS if name in ("num_layers", "mtp_num_layers") else _MOST
        if value is not None and not least <= value <= most:
            raise BadInput(f"recipe {recipe}: model.{name} = {value} is not a size; use {least} to {most}")


_TYPES = {name: kind for name, kind in get_type_hints(Architecture).items() if name in MODEL_FIELDS}
_SIZES = tuple(name for name, kind in _TYPES.items() if kind in (int, int | None))
_MAY_BE_ZERO = frozenset({"mtp_num_layers", "dsa_indexer_skip_topk_offset", "o_lora_rank"})
_MOST_LAYERS, _MOST = 100_000, 2**31


def _derive(model: dict[str, Any]) -> None:
    """Fill in what Megatron-Core derives from other sizes where it is not given."""
    heads, hidden = model["num_attention_heads"], model["hidden_size"]
    derived = {
        "ffn_hidden_size": 4 * hidden,
        "kv_channels": hidden // heads,
        "num_query_groups": heads,
    }
    if model.get("hybrid_layer_pattern"):
        derived["mamba_num_heads"] = 2 * hidden // (model.get("mamba_head_dim") or Architecture.mamba_head_dim)
    for name, value in derived.items():
        if model.get(name) is None:
            model[name] = value
    if model.get("num_moe_experts") is not None and model.get("moe_ffn_hidden_size") is None:
        model["moe_ffn_hidden_size"] = model["ffn_hidden_size"]


BLOCKS = "M*-EG"
# Fields with an entry for every decoder layer, and those that count the multi-token-prediction layers too
DECODER_ONLY = ("moe_layer_freq",)
WITH_PREDICTION = ("window_attn_skip_freq", "linear_attention_freq", "csa_compress_ratios")


def fit_layers(model: dict[str, Any]) -> None:
    """Cut or continue the layer lists and the hybrid pattern of `model` to `num_layers`, in place.

    A list goes on with its last decoder entry; the entries of multi-token-prediction layers, behind them, are kept. A
    hybrid pattern goes on from its beginning. Without multi-token prediction its blocks of a pattern are dropped.
    """
    layers, mtp = model["num_layers"], model["mtp_num_layers"] or 0
    for name in DECODER_ONLY:
        if isinstance(entries := model.get(name), (list, tuple)):
            model[name] = _cut(entries, layers)
    for name in WITH_PREDICTION:
        if isinstance(entries := model.get(name), (list, tuple)):
            model[name] = _cut(entries, layers) + list(entries[-1:]) * mtp
    if pattern := model.get("hybrid_layer_pattern"):
        model["hybrid_layer_pattern"] = _fit_pattern(pattern, layers, mtp)


def _cut(entries: list[int] | tuple[int, ...], layers: int) -> list[int]:
    return (list(entries) + list(entries[-1:]) * layers)[:layers]


def _fit_pattern(pattern: str, layers: int, mtp: int) -> str:
    decoder, *prediction = pattern.split("/")
    blocks = [block for block in decoder if block in BLOCKS]
    if blocks and len(blocks) != layers:
        decoder = "".join((blocks * (layers // len(blocks) + 1))[:layers])
    return "/".join([decoder, *(prediction * mtp)[:mtp]])
