"""Precision recipes by name, the rules between their fields, and their way onto Megatron-Core's configs."""

import copy
import dataclasses
import logging
import pickle
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from tests.cases import every
from tests.golden import Sentence

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns of every optional package that is not installed
    pytest.importorskip("megatron.core")
    import megatron.core.utils as megatron_utils
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.enums import Fp8Recipe
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    from cloudai_mbridge.training import mixed_precision
    from cloudai_mbridge.training.compat import cuda_graphs
    from cloudai_mbridge.training.compat.transformer_engine import have_te
    from cloudai_mbridge.training.mixed_precision import (
        MIXED_PRECISION_RECIPES,
        MixedPrecisionConfig,
        get_mixed_precision_config,
        number_format,
        register,
        update_config_with_precision_overrides,
    )

# Fields, defaults, and what each recipe sets are compared with Megatron-Bridge's own: tests/interop/test_names.py
RECIPES = sorted(name for name in MIXED_PRECISION_RECIPES if "_" in name)
# What a recipe's name says -> the name of its number format
FORMATS = {
    "fp8_delayed": "fp8_ds", "mxfp8": "fp8_mx", "nvfp4": "nvfp4", "fp8_subchannel": "fp8_sc", "nanov2": "fp8_sc",
    "fp8_current": "fp8_cs", "bf16_mixed": "bf16", "fp16_mixed": "fp16",
}  # fmt: skip


def _model(**settings: Any) -> Any:
    # The default of 0.16 is one that it warns of
    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, **{cuda_graphs.FIELD: []}, **settings)


def _values(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


@pytest.fixture
def fake_te(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a FAKE Transformer Engine of a version importable. It has a version and nothing else."""

    def install(version: str) -> None:
        module = types.ModuleType("transformer_engine")
        module.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "transformer_engine", module)
        monkeypatch.setattr(megatron_utils, "_te_version", None)  # what Megatron-Core remembers

    return install


def test_fields_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        MixedPrecisionConfig(True)  # type: ignore[call-arg, misc]


@every("name", RECIPES)
def test_a_recipe_is_what_its_name_says_and_has_two_names_and_a_function(name: str) -> None:
    config = get_mixed_precision_config(name)
    assert number_format(config) == next(value for text, value in FORMATS.items() if text in name)
    dtype = torch.float16 if name.startswith("fp16") else torch.bfloat16
    assert (config.fp16, config.bf16) == (dtype == torch.float16, dtype == torch.bfloat16)
    assert config.params_dtype == config.pipeline_dtype == dtype
    in_16_bits = config.num_layers_at_start_in_bf16 + config.num_layers_at_end_in_bf16
    assert config.first_last_layers_bf16 is (in_16_bits > 0)
    hyphens = name.replace("_", "-")
    function = getattr(mixed_precision, name)
    assert MIXED_PRECISION_RECIPES[name] is MIXED_PRECISION_RECIPES[hyphens] is function
    assert function.__name__ == name
    assert get_mixed_precision_config(hyphens) == get_mixed_precision_config(name) == function()
    assert function() is not function()


def test_a_recipe_is_found_by_its_name(sentence: Sentence) -> None:
    assert set(MIXED_PRECISION_RECIPES) == {*RECIPES, *(name.replace("_", "-") for name in RECIPES)}
    config = MixedPrecisionConfig(bf16=True)
    assert get_mixed_precision_config(config) is config
    assert get_mixed_precision_config("bf16-with_mxfp8-mixed") == get_mixed_precision_config("bf16_with_mxfp8_mixed")
    for name in ("bf16_mixd", "bf16-mixd"):
        with pytest.raises(ValueError, match=f'recipe "{name}"; did you mean "bf16_mixed"') as error:
            get_mixed_precision_config(name)
        assert all(recipe in str(error.value) for recipe in RECIPES)
    with pytest.raises(ValueError) as caught:
        get_mixed_precision_config("int7")
    sentence(caught)


def test_register_adds_a_recipe_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "MIXED_PRECISION_RECIPES", dict(MIXED_PRECISION_RECIPES))

    @register
    def my_fp32() -> MixedPrecisionConfig:
        return MixedPrecisionConfig(fp32=True)

    assert my_fp32().fp32
    assert get_mixed_precision_config("my_fp32") == get_mixed_precision_config("my-fp32") == my_fp32()
    assert "my_fp32" not in MIXED_PRECISION_RECIPES


@every(
    ("given", "both"),
    [
        ({}, False),
        ({"fp8_param_gather": True}, True),
        ({"fp8_param": None, "fp8_param_gather": True}, True),
        ({"fp8_param": None}, False),
        ({"fp8_param": False}, False),
        ({"fp8_param": True, "fp8_param_gather": True}, True),
        ({"fp8_param": True, "fp8_param_gather": False}, False),  # as in Megatron-Bridge: the gather wins
        ({"fp8_param": False, "fp8_param_gather": True}, True),
        ({"fp8_param": True}, True),  # which Megatron-Bridge loses to the gather's default
    ],
)
@every("bits", ["fp8", "fp4"])
def test_the_two_names_of_fp8_parameters_agree_from_the_start(bits: str, given: dict[str, Any], both: bool) -> None:
    config = MixedPrecisionConfig(**{name.replace("fp8", bits): value for name, value in given.items()})
    assert (getattr(config, f"{bits}_param"), getattr(config, f"{bits}_param_gather")) == (both, both)
    assert set(vars(config)) == {field.name for field in fields(config)}


@every("name", ["fp8_param", "fp8_param_gather", "fp4_param", "fp4_param_gather"])
def test_setting_one_name_of_fp8_parameters_sets_the_other(name: str) -> None:
    config = MixedPrecisionConfig()
    for value in (True, False, True):
        setattr(config, name, value)
        assert (getattr(config, name[:9]), getattr(config, f"{name[:9]}_gather")) == (value, value)


@every("duplicate", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_is_equal(duplicate: Callable[[Any], Any]) -> None:
    for config in (get_mixed_precision_config("bf16_with_mxfp8_mixed"), MixedPrecisionConfig(fp8_param=True)):
        assert _values(duplicate(config)) == _values(config)
        assert _values(dataclasses.replace(config)) == _values(config)


@every("name", [name for name in RECIPES if "nvfp4" not in name])
def test_finalize_accepts_every_recipe_and_changes_nothing_twice(name: str) -> None:
    config = get_mixed_precision_config(name)
    before = _values(config)
    config.finalize()
    config.finalize()
    assert _values(config) == before


def test_finalize_fills_in_what_is_unset() -> None:
    config = MixedPrecisionConfig()
    config.fp8_param = config.fp4_param = None
    config.finalize()
    assert (config.fp8_param, config.fp8_param_gather) == (False, False)
    assert (config.fp4_param, config.fp4_param_gather) == (False, False)


def test_weights_in_fp4_need_a_megatron_core_that_gathers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "GATHERS_FP4", False)
    with pytest.raises(ValueError, match=r"fp4_param_gather=True requires Megatron-Core >= 0\.17"):
        MixedPrecisionConfig(fp4_param=True).finalize()


def test_fp4_and_fp8_exclude_each_other(sentence: Sentence) -> None:
    config = MixedPrecisionConfig(fp4="e2m1", fp8="hybrid")
    with pytest.raises(ValueError) as caught:
        config.finalize()
    sentence(caught)


@pytest.mark.skipif(have_te(), reason="Transformer Engine is installed")
@pytest.mark.parametrize("name", ["bf16_with_nvfp4_mixed", "nemotron_3_super_bf16_with_nvfp4_mixed"])
def test_fp4_without_transformer_engine(sentence: Sentence, name: str) -> None:
    with pytest.raises(ValueError) as caught:
        get_mixed_precision_config(name).finalize()
    sentence(caught)


def test_fp4_with_a_fake_transformer_engine(fake_te: Callable[[str], None], sentence: Sentence) -> None:
    fake_te("2.7.0.dev0")
    get_mixed_precision_config("bf16_with_nvfp4_mixed").finalize()
    fake_te("2.6.9")
    with pytest.raises(ValueError) as caught:
        get_mixed_precision_config("bf16_with_nvfp4_mixed").finalize()
    sentence(caught)


def test_setup_writes_every_shared_field_of_megatron_cores_configs() -> None:
    config = MixedPrecisionConfig(
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.float16,
        autocast_dtype=torch.bfloat16,
        grad_reduce_in_fp32=True,
        fp8="e4m3",
        fp8_recipe="mxfp8",
        first_last_layers_bf16=True,
        fp8_margin=3,
        fp8_amax_history_len=5,
        fp8_amax_compute_algo="max",
        fp8_wgrad=False,
        fp8_dot_product_attention=True,
        fp8_multi_head_attention=True,
        fp8_param_gather=True,
        loss_scale=2.0,
        initial_loss_scale=4.0,
        min_loss_scale=0.5,
        loss_scale_window=7,
        hysteresis=9,
        num_layers_at_start_in_bf16=1,
        num_layers_at_end_in_bf16=1,
        reuse_grad_buf_for_mxfp8_param_ag=True,
    )
    model, optimizer, ddp = _model(), OptimizerConfig(), DistributedDataParallelConfig()
    config.setup(model, optimizer, ddp)
    for target in (model, optimizer, ddp):
        for name, value in _values(config).items():
            if hasattr(target, name):
                assert getattr(target, name) == value, (type(target).__name__, name)
    assert (ddp.grad_reduce_in_fp32, ddp.fp8_param_gather, model.fp8_param) == (True, True, True)


def test_setup_writes_defaults_over_what_was_there() -> None:
    model = _model(fp16=True, params_dtype=torch.float16, fp8_margin=4)
    get_mixed_precision_config("bf16_mixed").setup(model)
    assert (model.fp16, model.bf16, model.params_dtype, model.fp8_margin) == (False, True, torch.bfloat16, 0)


def test_setup_leaves_other_fields_alone() -> None:
    model = _model()
    before = vars(model).copy()
    get_mixed_precision_config("bf16_mixed").setup(model)
    assert vars(model).keys() == before.keys()
    changed = {name for name, value in vars(model).items() if value != before[name]}
    recipe = {"bf16", "params_dtype", "pipeline_dtype"}
    other_defaults = {"autocast_dtype", "fp8_recipe", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"}
    assert changed == recipe | other_defaults


def test_an_update_returns_the_config_and_logs_each_change(caplog: pytest.LogCaptureFixture) -> None:
    ddp = DistributedDataParallelConfig()
    with caplog.at_level(logging.DEBUG, logger=mixed_precision.__name__):
        assert update_config_with_precision_overrides(MixedPrecisionConfig(), ddp) is ddp
    assert caplog.messages == ["DistributedDataParallelConfig.grad_reduce_in_fp32: False -> True"]


@every(
    ("settings", "name"),
    [
        ({}, "fp32"),
        ({"params_dtype": torch.float16}, "fp16"),
        ({"params_dtype": torch.int8}, ""),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "fp8_cs"),
        ({"fp8": "hybrid", "fp8_recipe": Fp8Recipe.delayed}, "fp8_ds"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "fp8_mx"),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, "fp8_sc"),
        ({"fp8": "hybrid", "fp8_recipe": "custom"}, "fp8"),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4"}, "nvfp4"),
    ],
)
def test_a_run_names_its_format(settings: dict[str, Any], name: str) -> None:
    """By it a report finds the peak that its share is of."""
    assert number_format(types.SimpleNamespace(**{"params_dtype": torch.float32, **settings})) == name
