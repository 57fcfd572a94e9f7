import math
import tomllib
from dataclasses import replace

import pytest

from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import Precision, gpus
from cloudai_mbridge.estimate.time.calibration import (
    HeldOutError,
    Setting,
    age,
    load_calibration,
    parse_calibration,
    powers,
)
from cloudai_mbridge.estimate.time.parts import IdealTimes
from cloudai_mbridge.recipes import recipe_names

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
