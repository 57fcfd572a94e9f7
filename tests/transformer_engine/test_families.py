"""Families whose layers have kernels for a GPU only: what the loop builds of them, and their initial weights."""

import pytest

from tests.transformer_engine.engine import FAMILIES, build, configure, gpu, on_one_rank, torch

# isort: split
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.startup import unsupported

# Family -> a layer's part -> its class
PARTS = {
    "nemotron_h": {
        "decoder.layers.0.mixer": "MambaMixer",
        "decoder.layers.0.mixer.in_proj": "TELayerNormColumnParallelLinear",
        "decoder.layers.1.self_attention.core_attention": "TEDotProductAttention",
        "decoder.layers.2.mlp.linear_fc1": "TELayerNormColumnParallelLinear",
        "decoder.layers.3.mlp.experts": "TEGroupedMLP",
        "decoder.final_norm": "RMSNorm",
    },
    "nemotron_3": {
        "decoder.layers.3.mlp.fc1_latent_proj": "TELinear",
        "mtp.layers.0.eh_proj": "TEColumnParallelLinear",
        "mtp.layers.0.mtp_model_layer.layers.0.self_attention.core_attention": "TEDotProductAttention",
        "mtp.layers.0.mtp_model_layer.layers.1.mlp.experts": "TEGroupedMLP",
    },
    "qwen3_next": {
        "decoder.layers.0.self_attention": "GatedDeltaNet",
        "decoder.layers.1.self_attention.core_attention": "TEDotProductAttention",
        "mtp.layers.0.mtp_model_layer.self_attention.core_attention": "TEDotProductAttention",
    },
    "glm5": {
        "decoder.layers.0.self_attention": "AbsorbedMLASelfAttention",
        "decoder.layers.1.self_attention.core_attention": "DSAttention",
        "decoder.layers.1.self_attention.core_attention.indexer": "DSAIndexer",
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers(family: str) -> None:
    model = on_one_rank(family, with_te=True).model
    assert {path: type(model.get_submodule(path)).__name__ for path in PARTS[family]} == PARTS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_are_those_of_the_whole(family: str) -> None:
    """What a rank would write into a checkpoint is what one rank has there: also of parts that are split by turns."""
    whole = {key: tensor for (key, *_), tensor in on_one_rank(family, with_te=True).checkpoint.items()}
    for rank in range(2):
        with gpu():
            built = build(configure(family, tensor_model_parallel_size=2, sequence_parallel=True), rank, 2)
        for (key, shape, offset), tensor in built.checkpoint.items():
            if ".experts." in key or "linear_fc1" in key:  # several parts under one key: see test_weights.py
                continue
            assert shape == tuple(whole[key].shape), key
            place = tuple(slice(start, start + size) for start, size in zip(offset, tensor.shape, strict=True))
            assert tensor.equal(whole[key][place]), key
        assert {key for key, *_ in built.checkpoint} == whole.keys()


def test_weights_of_mixers_have_their_own_distributions() -> None:
    weights = {name: each.float() for name, each in on_one_rank("nemotron_h", with_te=True).weights.items()}
    mixer = "decoder.layers.0.mixer."
    decay = weights[f"{mixer}A_log"].exp()
    step = torch.nn.functional.softplus(weights[f"{mixer}dt_bias"])
    assert 1 <= decay.min() < decay.max() <= 16.1
    assert 0.9e-3 < step.min() < step.max() < 0.11
    assert weights[f"{mixer}conv1d_weight"].abs().max() <= 0.5
    assert weights[f"{mixer}out_proj.weight"].std().item() == pytest.approx(0.01, rel=0.05)  # 0.02 / sqrt(4 layers)


@pytest.mark.parametrize(("family", "package"), [("nemotron_h", "mamba_ssm"), ("qwen3_next", "fla")])
def test_a_missing_package_is_named(family: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported, "find_spec", lambda name: None if name == package else name)
    with gpu(), pytest.raises(ConfigError, match=rf"kernels of {package} are not installed; install cloudai-mbridge\["):
        build(configure(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cpu_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=r"needs Transformer Engine and a GPU"):
        build(configure(family))
