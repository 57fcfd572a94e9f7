"""What the loop builds with Transformer Engine: the layers, the fusions, the optimizer and the checkpoint."""

from collections import Counter

import pytest

from tests.transformer_engine.engine import MODELS, Built, build, configure, gpu, on_one_rank

# isort: split
from megatron.core.tensor_parallel import layers

from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.models import provider
from cloudai_mbridge.training.schema import not_done

# What the loop turns on where Transformer Engine is there
FUSIONS = (
    *("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "cross_entropy_loss_fusion"),
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm"),
    *("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"),
)
ATTENTION = {
    "self_attention.linear_qkv": "TELayerNormColumnParallelLinear",
    "self_attention.core_attention": "TEDotProductAttention",
    "self_attention.linear_proj": "TERowParallelLinear",
}
LATENT = {
    "input_layernorm": "RMSNorm",
    "self_attention.linear_q_down_proj": "TELinear",
    "self_attention.linear_q_up_proj": "TELayerNormColumnParallelLinear",
    "self_attention.linear_kv_down_proj": "TELinear",
    "self_attention.linear_kv_up_proj": "TELayerNormColumnParallelLinear",
    "self_attention.core_attention": "TEDotProductAttention",
    "self_attention.linear_proj": "TERowParallelLinear",
}
MLP = {"mlp.linear_fc1": "TELayerNormColumnParallelLinear", "mlp.linear_fc2": "TERowParallelLinear"}
SHARED = {
    "pre_mlp_layernorm": "RMSNorm",
    "mlp.router": "TopKRouter",
    "mlp.shared_experts.linear_fc1": "TEColumnParallelLinear",
    "mlp.shared_experts.linear_fc2": "TERowParallelLinear",
}
SEQUENTIAL = {
    **SHARED,
    "mlp.experts": "SequentialMLP",
    "mlp.experts.local_experts.3.linear_fc1": "TEColumnParallelLinear",
    "mlp.experts.local_experts.3.linear_fc2": "TERowParallelLinear",
}
GROUPED = {
    **SHARED,
    "mlp.experts": "TEGroupedMLP",
    "mlp.experts.linear_fc1": "TEColumnParallelGroupedLinear",
    "mlp.experts.linear_fc2": "TERowParallelGroupedLinear",
}
QK_NORMS = {"self_attention.q_layernorm": "RMSNorm", "self_attention.k_layernorm": "RMSNorm"}
PREDICTION = {"enorm": "RMSNorm", "hnorm": "RMSNorm", "eh_proj": "TEColumnParallelLinear"}
INNER = "mtp_model_layer"
# Model -> the classes in a layer of it
LAYERS = {
    "dense": {"decoder.layers.1": ATTENTION | MLP},
    "qk_norm": {"decoder.layers.1": ATTENTION | QK_NORMS | MLP},
    "mla": {"decoder.layers.1": LATENT | MLP},
    "sequential": {"decoder.layers.0": ATTENTION | MLP, "decoder.layers.1": ATTENTION | SEQUENTIAL},
    "grouped": {"decoder.layers.0": ATTENTION | MLP, "decoder.layers.1": ATTENTION | GROUPED},
    "mtp": {"mtp.layers.0": PREDICTION, f"mtp.layers.0.{INNER}": ATTENTION | GROUPED},
}
IN_A_LAYER_NORM_LINEAR = ["layer_norm_weight", "weight"]


@pytest.mark.parametrize("model", MODELS)
def test_layers_are_transformer_engines(model: str) -> None:
    built = on_one_rank(model, with_te=True)
    assert built.config.model.transformer_impl == "transformer_engine"
    for layer, classes in LAYERS[model].items():
        modules = dict(built.model.get_submodule(layer).named_modules())
        assert {path: type(modules[path]).__name__ for path in classes} == classes
    assert type(built.model.decoder.final_layernorm).__module__.startswith("transformer_engine.")


@pytest.mark.parametrize("model", MODELS)
def test_parameters_have_the_names_that_transformer_engine_gives(model: str) -> None:
    """The names in a checkpoint of another kind, in `l2_norm/grad/...` and in messages."""
    weights = on_one_rank(model, with_te=True).weights
    for layer, classes in LAYERS[model].items():
        for path, name in classes.items():
            own = [each.removeprefix(f"{layer}.{path}.") for each in weights if each.startswith(f"{layer}.{path}.")]
            match name:
                case "TELayerNormColumnParallelLinear":
                    assert own == IN_A_LAYER_NORM_LINEAR, path
                case "TEColumnParallelGroupedLinear" | "TERowParallelGroupedLinear":
                    assert own == [f"weight{number}" for number in range(4)], path
                case "TEDotProductAttention":
                    assert own == [], path
                case "TELinear" | "TEColumnParallelLinear" | "TERowParallelLinear" | "RMSNorm" | "TopKRouter":
                    assert own == ["weight"], path


def test_fusions() -> None:
    """On a CPU they are all off."""
    with_te, without = (on_one_rank("grouped", with_te=there).config.model for there in (True, False))
    assert all(getattr(with_te, name) for name in FUSIONS)
    assert not any(getattr(without, name) for name in FUSIONS)


@pytest.mark.parametrize("has_apex", [False, True])
def test_weight_gradients_are_accumulated_in_the_products_that_can(
    has_apex: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-Core's own output layer needs Apex for it, and refuses to be built without."""
    monkeypatch.setattr(provider, "has_apex_extension", lambda: has_apex)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", has_apex)
    with gpu():
        built = build(configure("grouped"))
    fused = {type(each).__name__ for each in built.model.modules() if getattr(each, "fuse_wgrad_accumulation", False)}
    assert fused >= {*ATTENTION.values(), "TEColumnParallelGroupedLinear"} - {"TEDotProductAttention"}
    assert built.model.output_layer.gradient_accumulation_fusion is has_apex
    assert built.config.model.gradient_accumulation_fusion


def test_local_layers_are_refused() -> None:
    with gpu(), pytest.raises(ConfigError, match=r"transformer_impl = 'local' \(Transformer Engine is installed"):
        build(configure("dense", transformer_impl="local"))


@pytest.mark.parametrize("model", MODELS)
def test_weight_decay_and_experts_are_those_of_a_cpu(model: str) -> None:
    with_te, without = (_optimized(on_one_rank(model, with_te=there)) for there in (True, False))
    assert with_te == without
    assert sum(with_te.values()) == sum(each.numel() for each in on_one_rank(model, with_te=True).weights.values())


def _optimized(built: Built) -> Counter[tuple[bool, float]]:
    """(of an expert, multiplier of the weight decay) -> parameters."""
    counts: Counter[tuple[bool, float]] = Counter()
    for group in built.optimizer.param_groups:
        counts[group["is_expert_parallel"], group["wd_mult"]] += sum(each.numel() for each in group["params"])
    return counts


# Keys of norms that Megatron-Core gives to its own layers -> those of Transformer Engine's. Such a checkpoint of a CPU
# is none for a GPU
MOE_NORMS = {"decoder.layers.1.mlp.linear_fc1.layer_norm_weight": "decoder.layers.1.pre_mlp_layernorm.weight"}
OTHER_KEYS = {
    "mla": {
        f"decoder.layers.{local}": f"decoder.layers.{engine}"
        for local, engine in {
            "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
            "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
            "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
        }.items()
    },
    "sequential": MOE_NORMS,
    "grouped": MOE_NORMS,
    "mtp": MOE_NORMS
    | {
        "mtp.layers.0.transformer_layer.mlp.linear_fc1.layer_norm_weight": (
            "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight"
        )
    },
}


@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_is_that_of_a_cpu(model: str) -> None:
    """The same keys, places and values, but for some norms."""
    with_te, without = (on_one_rank(model, with_te=there).checkpoint for there in (True, False))
    other = OTHER_KEYS.get(model, {})
    expected = {(other.get(key, key), *place): tensor for (key, *place), tensor in without.items()}
    assert with_te.keys() == expected.keys()
    for place, tensor in with_te.items():
        assert tensor.equal(expected[place].reshape(tensor.shape)), place


@pytest.fixture
def lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lift the refusal of what the loop does not do yet, and what is built without a GPU."""
    monkeypatch.delitem(not_done.ASKS_FOR_NOTHING, "model.softmax_type", raising=False)


@pytest.mark.usefixtures("lifted")
@pytest.mark.parametrize(("kind", "is_parameter"), [("learnable", True), ("off-by-one", False)])
def test_attention_sinks(kind: str, is_parameter: bool) -> None:
    with gpu():
        built = build(configure("dense", softmax_type=kind))
    offset = "self_attention.core_attention.softmax_offset"
    found = {name: weight for name, weight in built.weights.items() if "softmax" in name}
    assert list(found) == [f"decoder.layers.{layer}.{offset}" for layer in range(2) if is_parameter]
    assert all(weight.shape == (4,) and not weight.any() for weight in found.values())
    assert {name for name, *_ in built.checkpoint if "softmax" in name} == (
        {f"decoder.layers.{offset}"} if is_parameter else set()
    )
