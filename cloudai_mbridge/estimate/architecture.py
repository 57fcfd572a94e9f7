"""Model dimensions for the formulas, from a recipe and a point's arguments; no torch.

Sources of a value, in increasing precedence: Megatron-Core's default (below, if the field has one), the defaults of all
our recipes (`recipes.container.MODEL_DEFAULTS`), the recipe's `[model]` table, the point's arguments (`_ARGUMENTS`),
and `model.*` of its `extra_cmd_args`. A list of one entry per layer is truncated or extended if the point's number of
layers differs from the recipe's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes.apply import MAPPED, parse_value
from cloudai_mbridge.recipes.container import HYBRID, MODEL_DEFAULTS
from cloudai_mbridge.recipes.load import Recipe, fit_pattern

PerLayer = int | tuple[int, ...] | None


@dataclass(frozen=True)
class Architecture:
    """A model, in Megatron-Core's names and with its defaults. Sizes are the whole model's; hashable.

    activation: silu, gelu, quick_gelu, squared_relu. tensor_model_parallel_size: for the padding of the vocabulary.
    mtp_num_layers: 0 if none are trained. csa_*, o_*, dsa_*, linear_*: of attention variants that the formulas know
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
    activation_func_clamp_value: float | None = None
    use_transformer_engine_op_fuser: bool = False
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
    mtp_use_repeated_layer: bool = False
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


MODEL_FIELDS = frozenset(field.name for field in fields(Architecture)) - {"recipe"}
# arguments of a point -> fields; the last one sets the order of the layers with experts
_ARGUMENTS = {name: name for name in ("hidden_size", "num_layers", "num_moe_experts", "vocab_size", "seq_length")}
_ARGUMENTS |= {"tp": "tensor_model_parallel_size", "first_k_dense_replace": "first_k_dense_replace"}


def architecture(
    recipe: Recipe,
    args: ResolvedCmdArgs | None = None,
    extra: Mapping[str, str] | None = None,
    *,
    mtp_num_layers: int | None = None,
) -> Architecture:
    """Return the model that a point trains.

    extra: the point's `extra_cmd_args`; only `model.*` is read. mtp_num_layers: None takes the recipe's, unless
    `extra` overrides it.
    BadInput: `extra` sets a size to a value that the formulas cannot read.
    """
    given = () if args is None else tuple((name, getattr(args, name)) for name in _ARGUMENTS)
    return _architecture(recipe, given, tuple((extra or {}).items()), mtp_num_layers)


@lru_cache(maxsize=4096)  # points of a sweep share few architectures
def _architecture(
    recipe: Recipe,
    given: tuple[tuple[str, int | None], ...],
    extra: tuple[tuple[str, str], ...],
    mtp_num_layers: int | None,
) -> Architecture:
    own = recipe.sections["model"]
    model = {**MODEL_DEFAULTS, "activation": "silu", **(HYBRID if "hybrid_layer_pattern" in own else {}), **own}
    model.update({_ARGUMENTS[name]: value for name, value in given if value is not None})
    model.update(_overrides(extra))
    _check_sizes(recipe.name, model)
    dense = model.pop("first_k_dense_replace", None)
    if dense is not None and model.get("num_moe_experts") is not None:
        model["moe_layer_freq"] = [int(index >= dense) for index in range(model["num_layers"])]
    if mtp_num_layers is not None:
        model["mtp_num_layers"] = mtp_num_layers
    elif model.get("mtp_num_layers") is None:
        model["mtp_num_layers"] = recipe.mtp_num_layers
    _fit_layers(model)
    _derive(model)
    has_experts = model.get("num_moe_experts") is not None
    known: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in model.items()
        if name in MODEL_FIELDS and (has_experts or not name.startswith("moe_"))
    }
    _check_sizes(recipe.name, known)
    return Architecture(recipe=recipe.name, **known)


def _check_sizes(recipe: str, model: Mapping[str, Any]) -> None:
    """Raise BadInput if a size is not a positive whole number in range."""
    for name in SIZES:
        value = model.get(name)
        if value is not None and value not in (sizes := sizes_of(name)):
            raise BadInput(
                f"recipe {recipe}: model.{name} = {value} is not a size; use {sizes.start} to {sizes.stop - 1}"
            )


_TYPES = {name: kind for name, kind in get_type_hints(Architecture).items() if name in MODEL_FIELDS}
SIZES = frozenset(name for name, kind in _TYPES.items() if kind in (int, int | None))
_MAY_BE_ZERO = frozenset({"mtp_num_layers", "dsa_indexer_skip_topk_offset", "o_lora_rank"})
_MOST_LAYERS, _MOST = 100_000, 2**31


def sizes_of(name: str) -> range:
    """Return the possible values of a size of the model."""
    most = _MOST_LAYERS if name in ("num_layers", "mtp_num_layers") else _MOST
    return range(0 if name in _MAY_BE_ZERO else 1, most + 1)


def _derive(model: dict[str, Any]) -> None:
    """Fill in missing sizes as Megatron-Core derives them from other sizes."""
    heads, hidden = model["num_attention_heads"], model["hidden_size"]
    derived = {"ffn_hidden_size": 4 * hidden, "kv_channels": hidden // heads, "num_query_groups": heads}
    if model.get("hybrid_layer_pattern"):
        derived["mamba_num_heads"] = 2 * hidden // (model.get("mamba_head_dim") or Architecture.mamba_head_dim)
    for name, value in derived.items():
        if model.get(name) is None:
            model[name] = value
    if model.get("num_moe_experts") is not None and model.get("moe_ffn_hidden_size") is None:
        model["moe_ffn_hidden_size"] = model["ffn_hidden_size"]


# Fields with an entry for every decoder layer; all but the first count the multi-token-prediction layers too
LAYER_LISTS = ("moe_layer_freq", "window_attn_skip_freq", "linear_attention_freq", "csa_compress_ratios")


def _fit_layers(model: dict[str, Any]) -> None:
    """Truncate or extend the layer lists and the hybrid pattern of `model` to `num_layers`, in place.

    A list is extended with its last decoder entry; the entries of multi-token-prediction layers, after them, are kept.
    A hybrid pattern repeats from its beginning. Without multi-token prediction its blocks of a pattern are dropped.
    """
    layers, mtp = model["num_layers"], model["mtp_num_layers"] or 0
    for name in LAYER_LISTS:
        if isinstance(entries := model.get(name), (list, tuple)):
            last = list(entries[-1:])
            decoder = [*entries, *last * layers][:layers]
            model[name] = decoder if name == "moe_layer_freq" else decoder + last * mtp
    if pattern := model.get("hybrid_layer_pattern"):
        model["hybrid_layer_pattern"] = fit_pattern(pattern, layers, mtp)


_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# settings that determine the layout must be arguments, so that layout and rules see them
_LAYOUT = ("tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length", "pipeline_model_parallel_layout")
_ARGUMENT_OF = {".".join(MAPPED[argument]): argument for argument in (*_LAYOUT, "compute_dtype")}


def _overrides(extra: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Return the model settings in `extra_cmd_args`: every `model.*` key that the formulas read, by its type.

    BadInput: a value has the wrong type, or belongs in `cmd_args`, which the layout reads.
    """
    given: dict[str, Any] = {}
    for key, text in extra:
        name = key.lstrip("+")
        if argument := _ARGUMENT_OF.get(name):
            raise BadInput(f"extra_cmd_args: {key!r} is cmd_args.{argument}; set it there")
        section, _, field = name.partition(".")
        if section == "model" and field in _TYPES:
            given[field] = _read(key, text, _TYPES[field])
    return given


def _read(key: str, text: str, wanted: Any) -> Any:
    kinds = set(get_args(wanted)) if isinstance(wanted, UnionType) else {wanted}
    value: Any = parse_value(text)
    if isinstance(value, str) and value.lower() in ("null", "none") and type(None) in kinds:
        return None
    if isinstance(value, str) and value.lower() in _BOOLEANS and bool in kinds:
        return _BOOLEANS[value.lower()]
    if isinstance(value, list) and all(_is(int, entry) for entry in value) and any(map(get_origin, kinds)):
        return tuple(value)
    for kind in (kind for kind in kinds if isinstance(kind, type)):
        if _is(kind, value) or (kind is float and _is(int, value)):
            return value
    raise BadInput(f"extra_cmd_args: {key!r}: {text!r} is not {' or '.join(sorted(map(_name, kinds)))}; correct it")


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _name(kind: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return names.get(kind, "a list of whole numbers")
