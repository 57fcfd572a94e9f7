"""FP8 and FP4 over weights in bf16: what Megatron-Core makes of the settings. None of it runs here.

Weights in 8 or 4 bits, and training, are in `test_emulated_training`.
"""

from dataclasses import fields
from typing import Any

import pytest

from tests.transformer_engine.engine import Built, build, configure, gpu, on_one_rank, torch

# isort: split
from megatron.core import fp4_utils, fp8_utils
from megatron.core.transformer.module import MegatronModule

from cloudai_mbridge.training import setup
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.mixed_precision import get_mixed_precision_config
from cloudai_mbridge.training.startup.prepare import prepare

# cmd_args.compute_dtype -> class and attributes of the recipe that Megatron-Core makes of it
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8_cs": ("Float8CurrentScaling", {"fp8_format": "HYBRID", "fp8_dpa": False}),
    "fp8_ds": (
        "TEDelayedScaling",
        {"fp8_format": "HYBRID", "margin": 0, "amax_history_len": 1024, "amax_compute_algo": "max"},
    ),
    "fp8_sc": ("Float8BlockScaling", {"fp8_format": "HYBRID"}),
    "fp8_mx": ("MXFP8BlockScaling", {"fp8_format": "E4M3"}),
    "nvfp4": ("NVFP4BlockScaling", {"fp4_format": "E2M1", "fp8_format": "E4M3"}),
}
# Weights in bf16
IN_16_BITS = {"fp8_param_gather": False, "fp4_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False}


def in_format(dtype: str, model: str, **precision: Any) -> Built:
    config = configure(model, dtype=dtype)
    for name, value in {**IN_16_BITS, **precision}.items():
        setattr(config.mixed_precision, name, value)
    with gpu():
        return build(config)


@pytest.mark.parametrize("model", ["dense", "grouped", "mla"])
@pytest.mark.parametrize("dtype", RECIPES)
def test_recipe(dtype: str, model: str) -> None:
    built = in_format(dtype, model)
    config = built.config.model
    made = fp4_utils.get_fp4_recipe(config) if config.fp4 else fp8_utils.get_fp8_recipe(config)
    name, attributes = RECIPES[dtype]
    assert type(made).__name__ == name
    assert {key: getattr(value := getattr(made, key), "name", value) for key in attributes} == attributes
    in_bf16 = on_one_rank(model, with_te=True)
    assert built.weights.keys() == in_bf16.weights.keys()
    for key, weight in built.weights.items():
        assert weight.dtype is torch.bfloat16, key
        assert weight.equal(in_bf16.weights[key]), key
    assert built.checkpoint.keys() == in_bf16.checkpoint.keys()
    groups = [[list(each["params"]) for each in side.optimizer.param_groups] for side in (built, in_bf16)]
    assert [[len(params) for params in group] for group in groups[0]] == [
        [len(p) for p in group] for group in groups[1]
    ]


@pytest.mark.parametrize(("is_on", "kept"), [(True, [0, 3]), (False, [])])
def test_first_and_last_layers_stay_in_bf16_where_that_is_set(is_on: bool, kept: list[int]) -> None:
    """Upstream's performance recipes write down how many and do not switch it on."""
    config = in_format("fp8_cs", "dense", first_last_layers_bf16=is_on).config.model
    config.num_layers = 4
    assert [number for number in range(4) if fp8_utils.is_first_last_bf16_layer(config, number)] == kept


@pytest.mark.parametrize("dtype", ["fp8_ds", "fp8_cs"])
def test_attention_in_fp8(dtype: str) -> None:
    config = in_format(dtype, "dense", fp8_dot_product_attention=True).config.model
    assert fp8_utils.get_fp8_recipe(config).fp8_dpa
    assert config.fp8_dot_product_attention


@pytest.mark.parametrize(
    "recipe",
    [
        f"bf16_with_{name}_mixed"
        for name in ("fp8_current_scaling", "fp8_delayed_scaling", "fp8_subchannel_scaling", "mxfp8", "nvfp4")
    ],
)
def test_a_recipe_reaches_all_that_it_has_to(recipe: str) -> None:
    """The recipes by name, weights and all: what the model, the optimizer and DDP are built from."""
    config = configure("dense")
    config.mixed_precision = recipe
    with gpu():
        prepare(config)
    precision = get_mixed_precision_config(recipe)
    for section in (config.model, config.optimizer, config.ddp):
        names = {each.name for each in fields(precision)} & set(vars(section)) - {"autocast_dtype"}  # None is 16 bits
        assert {name: getattr(section, name) for name in names} == {name: getattr(precision, name) for name in names}
    assert {"fp8_param_gather", "fp4_param_gather"} <= vars(config.ddp).keys()


def test_adam_is_not_given_fp8_weights_that_it_cannot_update() -> None:
    """It ends in the first step: "Master param tensor 0 has dtype=Int16"."""
    config = configure("dense", dtype="fp8_ds")
    config.optimizer.use_distributed_optimizer = config.optimizer.use_precision_aware_optimizer = True
    with gpu(), pytest.raises(ConfigError, match="cannot update FP8 weights with delayed scaling; set it to False"):
        build(config)


def test_amax_histories_are_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the layers are where they stay, and before the parameters are moved into buffers."""
    corrected: list[Any] = []
    monkeypatch.setattr(setup, "correct_amax_history_if_needed", corrected.append)
    built = in_format("fp8_ds", "dense")
    assert [type(chunk).__name__ for (chunk,) in corrected] == ["Float16Module"]
    assert isinstance(built.model, MegatronModule)
    assert corrected[0][0].module is built.model


@pytest.mark.parametrize("dtype", RECIPES)
def test_a_cpu_refuses_a_format_in_one_line(dtype: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^this machine cannot train that: mixed_precision\.fp\d = .* needs Transformer"
    ):
        build(configure("dense", dtype=dtype))
