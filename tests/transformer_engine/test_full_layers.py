"""`model.use_transformer_engine_full_layer_spec`: one layer of Transformer Engine computes that of Megatron-Core."""

from typing import Any

import pytest

from tests.transformer_engine.emulated_run import differences, train
from tests.transformer_engine.engine import GPT3, Built, build, configure, gpu, torch

# isort: split
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.models import engine_layers

WHOLE = {**GPT3, engine_layers.FIELD: True}
LAYER = "decoder.layers.1.transformer_layer"
TWO_RANKS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def _build(world: int = 1, rank: int = 0, **fields: Any) -> Built:
    with gpu():
        return build(configure("dense", **fields), rank, world)


def test_weights_and_checkpoint_are_those_of_the_usual_layers_under_its_own_names() -> None:
    whole, usual = _build(**WHOLE), _build(**GPT3)
    assert type(whole.model.get_submodule(LAYER)).__module__ == "transformer_engine.pytorch.transformer"
    assert sum(each.numel() for each in whole.weights.values()) == sum(each.numel() for each in usual.weights.values())
    for name, (of_core, _) in engine_layers.PARAMETERS.items():
        expected = usual.weights[f"decoder.layers.1.{of_core}"]
        assert whole.weights[f"{LAYER}.{name}"].equal(expected), name
    stored = {key for key, *_ in whole.checkpoint if key.startswith("decoder.layers.")}
    assert stored == {f"decoder.layers.{name.split('.', 3)[3]}" for name in whole.weights if name.startswith(LAYER)}


def test_two_ranks_hold_one_checkpoint() -> None:
    """Each has its half, as the usual layers have; Megatron-Bridge itself stores the first rank's alone."""
    whole = _build(**WHOLE)
    for rank in range(2):
        part = _build(2, rank, **WHOLE, **TWO_RANKS)
        layers = {place: value for place, value in part.checkpoint.items() if place[0].startswith("decoder.layers.")}
        assert {key for key, *_ in layers} == {key for key, *_ in whole.checkpoint if key.startswith("decoder.layers.")}
        for (key, shape, offset), value in layers.items():
            ((of_one, _, start), full), *_ = [
                (place, each)
                for place, each in whole.checkpoint.items()
                if place[:2] == (key, shape) and place[2][0] == offset[0]
            ]
            window = tuple(slice(at, at + size) for at, size in zip(offset[1:], value.shape, strict=True))
            assert value.equal(full[window]), (of_one, start)
        marked = {name for name, each in part.model.named_parameters() if getattr(each, "sequence_parallel", False)}
        assert {f"{LAYER}.layernorm_mlp.layer_norm_weight", f"{LAYER}.self_attention.proj.bias"} <= marked


# Measured: 0 or 1.2e-7 by processor, which is one unit in the last place of FP32, and 2e-7
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 2.4e-7), ("bf16", 1e-6)])
def test_losses_are_those_of_the_usual_layers(dtype: str, tolerance: float) -> None:
    whole, usual = (train("dense", {"dtype": dtype, **fields}) for fields in (WHOLE, GPT3))
    assert differences(whole.losses, usual.losses) <= tolerance
    assert differences(whole.norms, usual.norms) <= tolerance


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        _build(**{engine_layers.FIELD: True})
    for part in ("model.normalization = 'RMSNorm'", "(use 'LayerNorm'", "position_embedding_type = 'rope'", "groups"):
        assert part in str(refused.value)
    assert torch.nn.functional.gelu in engine_layers._FIELDS["activation_func"]
