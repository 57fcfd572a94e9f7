import math
from dataclasses import replace

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import Precision, gpu_named
from cloudai_mbridge.estimate.time.calibration import Setting, age, powers, trained_fraction, years
from tests.cases import every

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
