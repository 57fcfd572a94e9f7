"""FP8, FP4 and CUDA graphs over weights in bf16: what Megatron-Core makes of the settings. None of it runs here."""

from typing import Any

import pytest

from tests.transformer_engine.engine import Built, build, configure, gpu, on_one_rank, torch

# isort: split
from megatron.core import fp4_utils, fp8_utils
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from cloudai_mbridge.training.mixed_precision import get_mixed_precision_config
from cloudai_mbridge.training.schema import not_done

# Recipe of the loop -> class and attributes of the one that Megatron-Core makes of it
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16_with_fp8_current_scaling_mixed": ("Float8CurrentScaling", {"fp8_format": "HYBRID"}),
    "bf16_with_fp8_delayed_scaling_mixed": (
        "TEDelayedScaling",
        {"fp8_format": "HYBRID", "margin": 0, "amax_history_len": 1024, "amax_compute_algo": "max"},
    ),
    "bf16_with_fp8_subchannel_scaling_mixed": ("Float8BlockScaling", {"fp8_format": "HYBRID"}),
    "bf16_with_mxfp8_mixed": ("MXFP8BlockScaling", {"fp8_format": "E4M3"}),
    "bf16_with_nvfp4_mixed": ("NVFP4BlockScaling", {"fp4_format": "E2M1", "fp8_format": "E4M3"}),
}


@pytest.fixture(autouse=True)
def lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lift the refusals: the loop does not train so yet."""
    for field in ("model.fp8", "model.fp4", "model.cuda_graph_impl"):
        monkeypatch.delitem(not_done.ASKS_FOR_NOTHING, field, raising=False)


def in_format(recipe: str, model: str) -> Built:
    config = configure(model)
    precision = get_mixed_precision_config(recipe)
    precision.fp8_param = precision.reuse_grad_buf_for_mxfp8_param_ag = False  # weights in FP8 need a driver
    config.mixed_precision = precision
    with gpu():
        return build(config)


@pytest.mark.parametrize("model", ["dense", "grouped", "mla"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe(recipe: str, model: str) -> None:
    built = in_format(recipe, model)
    config = built.config.model
    made = fp4_utils.get_fp4_recipe(config) if config.fp4 else fp8_utils.get_fp8_recipe(config)
    name, attributes = RECIPES[recipe]
    assert type(made).__name__ == name
    assert {key: getattr(value := getattr(made, key), "name", value) for key in attributes} == attributes
    weights, in_bf16 = built.weights, on_one_rank(model, with_te=True).weights
    assert weights.keys() == in_bf16.keys()
    for key, weight in weights.items():
        assert weight.dtype is torch.bfloat16, key
        assert weight.equal(in_bf16[key]), key


def test_first_and_last_layers_stay_in_bf16() -> None:
    config = in_format("bf16_with_fp8_current_scaling_mixed", "dense").config.model
    config.num_layers = 4
    kept = [number for number in range(4) if fp8_utils.is_first_last_bf16_layer(config, number)]
    assert kept == [0, 3]


@pytest.mark.parametrize("implementation", ["local", "transformer_engine", "full_iteration"])
def test_cuda_graphs(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random states of a CPU stand for those that a graph may capture, its stream for one of a GPU."""
    monkeypatch.setattr(get_cuda_rng_tracker(), "use_cudagraphable_rng", True, raising=False)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    config = configure("grouped", cuda_graph_impl=implementation)
    config.rerun_state_machine.check_for_nan_in_loss = False
    with gpu():
        built = build(config)
    assert built.config.model.cuda_graph_impl == implementation
    graphs = [hasattr(layer, "cudagraph_manager") for layer in built.model.decoder.layers]
    assert graphs == [implementation == "local"] * 2
    without = on_one_rank("grouped", with_te=True).weights
    assert all(weight.equal(without[name]) for name, weight in built.weights.items())
