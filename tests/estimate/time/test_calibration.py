import math
import tomllib
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import Precision, gpu_named, gpus
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.time import calibration
from cloudai_mbridge.estimate.time.calibration import (
    CELL,
    CONFIGURATION,
    SCHEMES,
    HeldOutError,
    Setting,
    Switches,
    age,
    bound_of,
    load_calibration,
    parse_calibration,
    powers,
    switches_of,
    trained_fraction,
    years,
)
from cloudai_mbridge.estimate.time.parts import IdealTimes
from cloudai_mbridge.recipes import recipe_names
from tests.cases import every
from tests.golden import Sentence

_TOML = """
newest_container = "26.08"
source = "a test"
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
    coefficients = parse_calibration(tomllib.loads(_TOML), _HEAD).coefficients
    assert coefficients["tp_comm"].logarithm == math.log(0.5)
    assert coefficients["power"].logarithm == 1.5


_HEAD = "recipe,gpu,precision,layout," + ",".join(SCHEMES)


def rows_of(*cells: tuple[str, str, str, int, float]) -> str:
    """Return a table of rows: recipe, GPU, number format, how many, the error; more is left out, the larger it is.

    The rows of a cell are of one configuration.
    """
    lines = [_HEAD]
    for layout, (recipe, gpu, precision, number, error) in enumerate(cells):
        errors = [f"{error * factor}" for factor in (1, 2, 3, 4, 5, 6)]
        lines += [",".join([recipe, gpu, precision, str(layout), *errors])] * number
    return "\n".join(lines)


def error_in(table: str, recipe: str, gpu: str, precision: Precision, **options: Any) -> HeldOutError:
    return parse_calibration(tomllib.loads(_TOML), table).error_of(recipe, gpu, precision, **options)


MX, BF16 = Precision.FP8_MX, Precision.BF16


@every(
    ("asked", "options", "median", "why"),
    [
        # rows of the recipe or of the device
        (("a", "gb200", MX), {}, math.expm1(0.04), ""),
        # others of the configuration are in the fit
        (("a", "gb200", MX), {"is_in_fit": True}, math.expm1(0.02), ""),
        (("a", "gb200", BF16), {}, math.expm1(0.8), ""),  # of two in the cell itself, larger than of all alike
        (("b", "gb200", BF16), {}, math.expm1(0.6 * 2), "no published row is of b on gb200 in bf16"),
        (("new", "gb200", MX), {}, math.expm1(0.02 * 4), "no published row is of new on gb200 in fp8_mx"),
        (("a", "gb200", MX), {"is_changed": True}, math.expm1(0.02 * 4), "rows of a on gb200 in fp8_mx are of other"),
        (("a", "h100", MX), {}, None, "no published row is of h100 in fp8_mx"),
        (("a", "gb200", Precision.NVFP4), {}, None, "no published row is of gb200 in nvfp4"),
        (("a", "gb200", MX), {"why_unlike": "another task"}, math.inf, "another task"),
    ],
)
def test_the_error_is_that_of_rows_alike(
    asked: tuple[str, str, Precision], options: dict[str, Any], median: float | None, why: str
) -> None:
    table = rows_of(
        ("a", "gb200", "fp8_mx", 18, 0.02), ("b", "gb200", "fp8_mx", 2, 0.04), ("a", "gb200", "bf16", 2, 0.4)
    )
    found = error_in(table, *asked, **options)
    assert found.is_known is (why == "")
    assert why in found.why_unknown
    assert median is None or found.median == pytest.approx(median)
    assert (found.interval_s(1.0) is not None) is found.is_known


def test_a_published_point_without_a_twin_is_as_uncertain_as_a_new_one() -> None:
    """Its own row is all that the fit has of it; the errors of rows with twins in other containers say too little."""
    table = rows_of(("a", "gb200", "fp8_mx", 18, 0.02), ("a", "h100", "fp8_cs", 1, 0.2))
    found = [error_in(table, "a", "h100", Precision.FP8_CS, is_in_fit=is_in_fit) for is_in_fit in (False, True)]
    assert found[0] == found[1]
    assert found[1].median == pytest.approx(math.expm1(0.4))


def test_nine_of_ten_errors_are_within_the_bound() -> None:
    assert bound_of([0.01 * number for number in range(1, 10)]) == 0.09  # of nine the largest
    assert bound_of([0.01 * number for number in range(1, 20)]) == 0.18
    assert bound_of([-0.3, 0.1]) == 0.3
    low, high = HeldOutError(0.1, math.log(1.25), 9, "nine rows").interval_s(10.0) or (0, 0)
    assert (low, high) == (pytest.approx(8), pytest.approx(12.5))


@pytest.mark.parametrize(("level", "least", "most"), [(0.8, 0.72, 0.88), (0.9, 0.88, 0.96)])
def test_the_shipped_bounds_hold_for_rows_that_they_have_not_seen(
    monkeypatch: pytest.MonkeyPatch, level: float, least: float, most: float
) -> None:
    """Each row is asked of a table without its configuration, or without its cell for the error of unseen cells."""
    monkeypatch.setattr(calibration, "bound_of", partial(bound_of, level=level))
    shipped = load_calibration()
    for scheme, named in ((CONFIGURATION, "layout"), (CELL, "cell")):
        within = []
        for row in shipped.held_out:
            cell = (row.recipe, row.gpu, row.precision)
            others = tuple(
                other
                for other in shipped.held_out
                if (other.layout != row.layout if named == "layout" else (other[:3]) != cell)
            )
            found = replace(shipped, held_out=others).error_of(row.recipe, row.gpu, Precision(row.precision))
            within.append(abs(row.errors[scheme]) <= found.log_bound)
        assert least <= sum(within) / len(within) <= most, scheme


def test_every_coefficient_is_used_and_every_used_one_is_there(dense: Architecture, experts: Architecture) -> None:
    used = {"launches"}
    for model in (dense, experts, replace(experts, activation="quick_gelu")):
        for gpu in (gpu for gpu in gpus().values() if gpu.is_known):
            for precision in Precision:
                setting = Setting(model, gpu, precision, "26.02")
                used |= {name for name, _ in age(setting, "26.08")}
                for newest in (setting, setting._replace(container=None)):
                    used |= {
                        name
                        for part in IdealTimes._fields
                        for switches in (Switches(), Switches("router", overlaps_experts=True), Switches("full"))
                        for name, _ in powers(part, newest, switches)
                    }
    assert used == set(load_calibration().coefficients)


def test_coefficients_keep_to_physics() -> None:
    for coefficient in load_calibration().coefficients.values():
        assert coefficient.lower is None or coefficient.value >= 0.999 * coefficient.lower, coefficient.name
        assert coefficient.meaning
        assert not coefficient.is_fixed or coefficient.value == coefficient.prior


def test_errors_name_recipes() -> None:
    rows = load_calibration().held_out
    assert {row.recipe for row in rows} <= set(recipe_names())
    assert {row.gpu for row in rows} <= set(gpus())
    assert {Precision(row.precision) for row in rows} <= set(Precision)


def test_coefficients_of_parts_are_products(dense: Architecture) -> None:
    setting = Setting(dense, gpus()["gb200"], Precision.FP8_CS)
    calibration = load_calibration()
    factors = IdealTimes(*calibration.part_coefficients(setting, Switches()))
    value = {name: coefficient.value for name, coefficient in calibration.coefficients.items()}
    assert factors.matmul_mlp == pytest.approx(value["matmul_fp8"])
    assert factors.memory_matmul == pytest.approx(value["memory_matmul"] * value["quantised"])


def test_older_software_is_slower(dense: Architecture) -> None:
    calibration = load_calibration()
    newest = calibration.part_coefficients(Setting(dense, gpus()["gb200"], Precision.FP8_CS), Switches())
    older = calibration.part_coefficients(Setting(dense, gpus()["gb200"], Precision.FP8_CS, "25.08"), Switches())
    slowdown = math.exp(calibration.coefficients["year_dense"].value)
    assert older == pytest.approx([slowdown * factor for factor in newest])


GB200, H100 = gpu_named("gb200"), gpu_named("h100")


PLAIN = Switches()


def names(part: str, setting: Setting, switches: Switches = PLAIN) -> set[str]:
    return {name for name, exponent in powers(part, setting, switches) if exponent}


def test_matmuls_by_precision_and_generation(dense: Architecture) -> None:
    assert names("matmul_mlp", Setting(dense, GB200, Precision.FP8_MX)) == {"matmul_fp8_mx"}
    assert names("matmul_mlp", Setting(dense, H100, Precision.FP8_SC)) == {"matmul_hopper_fp8"}
    assert names("matmul_output", Setting(dense, GB200, Precision.NVFP4)) == {"matmul_bf16"}


def test_power_counts_relative_to_gb200(dense: Architecture) -> None:
    settings = {gpu: Setting(dense, gpu_named(gpu), Precision.BF16) for gpu in ("b200", "gb200", "gb300", "h100")}
    exponent = {gpu: dict(powers("matmul_mlp", one, Switches())).get("power") for gpu, one in settings.items()}
    assert exponent["gb200"] == 0
    assert exponent["h100"] is None
    assert exponent["gb300"] == pytest.approx(-math.log(1400 / 1200))
    assert exponent["b200"] == pytest.approx(-math.log(1000 / 2250 / (1200 / 2500)))


def test_graphs_launch_what_they_captured(experts: Architecture) -> None:
    blackwell, hopper = (Setting(experts, gpu, Precision.FP8_CS) for gpu in (GB200, H100))
    part = "launches_moe"
    assert names(part, blackwell) == {part, "grace", "quantised_launches"}
    assert names(part, hopper) == {part, "quantised_launches"}
    assert names(part, blackwell._replace(precision=Precision.BF16)) == {part, "grace"}
    assert names(part, hopper, Switches("router")) == {part, "router_graph", "quantised_launches"}
    assert names(part, blackwell, Switches("full")) == {part, "whole_graph"}
    assert names("launches_network", blackwell, Switches("full")) == {"launches_network"}


def test_what_overlaps_is_hidden_in_part(experts: Architecture) -> None:
    setting = Setting(experts, H100, Precision.BF16)
    for part in ("ep_nvlink", "ep_network"):
        assert names(part, setting, Switches(overlaps_experts=True)) - names(part, setting) == {"overlapped"}
    assert names("tp_comm", setting, Switches(overlaps_experts=True)) == {"tp_comm"}


def test_switches_are_those_of_the_layout(expert_layout: ParallelLayout) -> None:
    assert switches_of(expert_layout) == Switches()
    assert switches_of(replace(expert_layout, cuda_graph="attention")) == Switches()
    assert switches_of(replace(expert_layout, cuda_graph="attention", captures_router=True)) == Switches("router")
    full = replace(expert_layout, cuda_graph="full", overlap_moe_expert_parallel_comm=True)
    assert switches_of(full) == Switches("full", overlaps_experts=True)


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
def test_no_version(sentence: Sentence, container: str) -> None:
    with pytest.raises(BadInput, match=r"^container:") as caught:
        years(container)
    sentence(caught)


def test_frozen_weights_have_no_gradient(dense: Architecture) -> None:
    setting = Setting(dense, GB200, Precision.BF16, is_frozen=True)
    assert trained_fraction("matmul_mlp", setting) == pytest.approx(2 / 3)
    assert (trained_fraction("dp_comm", setting), trained_fraction("optimizer", setting)) == (0, 0)
    assert (
        trained_fraction("attention_core", setting)
        == trained_fraction("matmul_mlp", setting._replace(is_frozen=False))
        == 1
    )
