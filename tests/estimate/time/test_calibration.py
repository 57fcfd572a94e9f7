import math
import tomllib
from dataclasses import replace

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import Precision, gpu_named, gpus
from cloudai_mbridge.estimate.time.calibration import (
    HeldOutError,
    Setting,
    age,
    load_calibration,
    parse_calibration,
    powers,
    trained_fraction,
    years,
)
from cloudai_mbridge.estimate.time.parts import IdealTimes
from cloudai_mbridge.recipes import recipe_names
from tests.cases import every

_TOML = """
newest_container = "26.08"
source = "a test"
held_out.new_model = { num_rows = 9, median = 0.2 }
held_out.by_recipe.llama3_8b = { num_rows = 6, median = 0.05 }
held_out.by_gpu.gb200.fp8_mx = { num_rows = 4, median = 0.08, recipes = { llama3_8b = 1, x = 3 } }
[coefficients.tp_comm]
value = 0.5
meaning = "a factor"
prior = 0.5
prior_sd = 0.5
[coefficients.power]
value = 1.5
meaning = "an exponent"
prior = 1
prior_sd = 1
is_rate = true
"""


def test_a_factor_counts_by_its_logarithm_and_a_rate_as_it_is() -> None:
    coefficients = parse_calibration(tomllib.loads(_TOML)).coefficients
    assert coefficients["tp_comm"].logarithm == math.log(0.5)
    assert coefficients["power"].logarithm == 1.5


def test_error_of_a_recipe_and_of_another_model() -> None:
    calibration = parse_calibration(tomllib.loads(_TOML))
    on = "gb200", Precision.FP8_MX
    found = calibration.error_of("llama3_8b", *on)
    assert found == HeldOutError("llama3_8b", 6, 0.08, device="gb200 in fp8_mx", device_rows=4, own_rows=1)
    assert str(found) == "median error 8 % on 4 published rows of gb200 in fp8_mx, 1 of this recipe, held out"
    text = "median error 20 % on 4 published rows of gb200 in fp8_mx, none of this recipe, held out"
    assert str(calibration.error_of("mine", *on)) == text
    none = calibration.error_of("llama3_8b", "gb200", Precision.BF16)
    assert (none.is_known, str(none)) == (False, "accuracy: none, as no published row is of gb200 in bf16")


def test_every_coefficient_is_used_and_every_used_one_is_there(dense: Architecture, experts: Architecture) -> None:
    used = {"launches"}
    for model in (dense, experts, replace(experts, activation="quick_gelu")):
        for gpu in (gpu for gpu in gpus().values() if gpu.is_known):
            for precision in Precision:
                setting = Setting(model, gpu, precision, "26.02")
                used |= {name for name, _ in age(setting, "26.08")}
                for newest in (setting, setting._replace(container=None)):
                    used |= {name for part in IdealTimes._fields for name, _ in powers(part, newest)}
    assert used == set(load_calibration().coefficients)


def test_coefficients_keep_to_physics() -> None:
    for coefficient in load_calibration().coefficients.values():
        assert coefficient.lower is None or coefficient.value >= 0.999 * coefficient.lower, coefficient.name
        assert coefficient.meaning
        assert not coefficient.is_fixed or coefficient.value == coefficient.prior


def test_errors_name_recipes() -> None:
    calibration = load_calibration()
    assert set(calibration.errors) <= set(recipe_names())
    assert all(0 < error.median < 0.5 for error in (*calibration.errors.values(), calibration.new_model_error))


def test_coefficients_of_parts_are_products(dense: Architecture) -> None:
    setting = Setting(dense, gpus()["gb200"], Precision.FP8_CS)
    calibration = load_calibration()
    factors = IdealTimes(*calibration.part_coefficients(setting))
    value = {name: coefficient.value for name, coefficient in calibration.coefficients.items()}
    assert factors.matmul_mlp == pytest.approx(value["matmul_fp8"])
    assert factors.memory_matmul == pytest.approx(value["memory_matmul"] * value["quantised"])


def test_older_software_is_slower(dense: Architecture) -> None:
    calibration = load_calibration()
    newest = calibration.part_coefficients(Setting(dense, gpus()["gb200"], Precision.FP8_CS))
    older = calibration.part_coefficients(Setting(dense, gpus()["gb200"], Precision.FP8_CS, "25.08"))
    slowdown = math.exp(calibration.coefficients["year_dense"].value)
    assert older == pytest.approx([slowdown * factor for factor in newest])


GB200, H100 = gpu_named("gb200"), gpu_named("h100")


def names(part: str, setting: Setting) -> set[str]:
    return {name for name, exponent in powers(part, setting) if exponent}


def test_matmuls_by_precision_and_generation(dense: Architecture) -> None:
    assert names("matmul_mlp", Setting(dense, GB200, Precision.FP8_MX)) == {"matmul_fp8_mx"}
    assert names("matmul_mlp", Setting(dense, H100, Precision.FP8_SC)) == {"matmul_hopper_fp8"}
    assert names("matmul_output", Setting(dense, GB200, Precision.NVFP4)) == {"matmul_bf16"}


def test_power_counts_relative_to_gb200(dense: Architecture) -> None:
    exponent = {gpu: dict(powers("matmul_mlp", Setting(dense, gpu_named(gpu), Precision.BF16))).get("power")
                for gpu in ("b200", "gb200", "gb300", "h100")}  # fmt: skip
    assert exponent["gb200"] == 0
    assert exponent["h100"] is None
    assert exponent["gb300"] == pytest.approx(-math.log(1400 / 1200))
    assert exponent["b200"] == pytest.approx(-math.log(1000 / 2250 / (1200 / 2500)))


def test_fused_experts_came_with_a_container(experts: Architecture, dense: Architecture) -> None:
    newest = Setting(experts, GB200, Precision.FP8_MX)
    assert newest.is_fused
    assert newest._replace(container="26.06").is_fused
    assert not newest._replace(container="26.04.01").is_fused
    assert not newest._replace(precision=Precision.BF16).is_fused
    assert not newest._replace(gpu=H100).is_fused
    assert not newest._replace(model=dense).is_fused
    assert not newest._replace(model=replace(experts, gated_linear_unit=False)).is_fused


def test_older_software_has_an_age(dense: Architecture, experts: Architecture) -> None:
    setting = Setting(dense, GB200, Precision.BF16)
    assert age(setting, "26.08") == ()
    assert age(setting._replace(container="25.08"), "26.08") == (("year_dense", 1.0),)
    assert age(setting._replace(model=experts, container="26.08"), "26.08") == (("year_moe", 0.0),)
    assert age(setting._replace(container="27.01"), "26.08") == (("year_dense", 0.0),)


def test_a_patch_release_is_a_little_later() -> None:
    assert years("26.04") < years("26.04.01") < years("26.05")


@every("container", ["", "26", "newest", "26.4", "26.04-rc1"])
def test_no_version(container: str) -> None:
    with pytest.raises(BadInput, match=r"^container: .* is not a version; write it as 26\.04 or 26\.04\.01$"):
        years(container)


def test_frozen_weights_have_no_gradient(dense: Architecture) -> None:
    setting = Setting(dense, GB200, Precision.BF16, is_frozen=True)
    assert trained_fraction("matmul_mlp", setting) == pytest.approx(2 / 3)
    assert (trained_fraction("dp_comm", setting), trained_fraction("optimizer", setting)) == (0, 0)
    assert (
        trained_fraction("attention_core", setting)
        == trained_fraction("matmul_mlp", setting._replace(is_frozen=False))
        == 1
    )
