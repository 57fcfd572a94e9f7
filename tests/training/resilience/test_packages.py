"""A configuration that needs a package which is not there is refused, with the key, the package and the remedy."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from cloudai_mbridge.training.config.profiling import TensorInspectConfig
from cloudai_mbridge.training.config.resilience import (
    FaultToleranceConfig,
    InProcessRestartConfig,
    NVRxStragglerDetectionConfig,
)
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.resilience import packages
from tests.cases import every

SECTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("ft.enable_ft_package", "nvidia-resiliency-ext", {"ft": FaultToleranceConfig(enable_ft_package=True)}),
    ("nvrx_straggler.enabled", "nvidia-resiliency-ext", {"nvrx_straggler": NVRxStragglerDetectionConfig(enabled=True)}),
    ("inprocess_restart.enabled", "nvidia-resiliency-ext", {"inprocess_restart": InProcessRestartConfig(enabled=True)}),
    ("tensor_inspect.enabled", "nvdlfw-inspect", {"tensor_inspect": TensorInspectConfig(enabled=True)}),
    ("logger.log_energy", "nvidia-ml-py", {"logger": SimpleNamespace(log_energy=True)}),
]


def config(**sections: Any) -> Any:
    off = dict.fromkeys(("ft", "nvrx_straggler", "inprocess_restart", "tensor_inspect"))
    logger, optimizer = SimpleNamespace(log_energy=False), SimpleNamespace(optimizer="adam")
    sections = {"model": SimpleNamespace(), "logger": logger, "optimizer": optimizer, **sections}
    return SimpleNamespace(**{**off, **sections})


@every(("key", "package", "section"), SECTIONS)
def test_missing(key: str, package: str, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda module: False)
    with pytest.raises(ConfigError) as refused:
        packages.check_packages(config(**section))
    for part in (f"{key}=true", f"pip install {package}", f"set {key}=false"):
        assert part in str(refused.value)


@every("section", [section for _, _, section in SECTIONS])
def test_installed(section: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    there = ("nvidia_resiliency_ext", "nvdlfw_inspect", "pynvml")
    monkeypatch.setattr(packages, "is_installed", lambda module: module in there)
    packages.check_packages(config(**section))


def test_what_is_off_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda module: False)
    packages.check_packages(config())
    off = {
        "ft": FaultToleranceConfig(simulate_fault=True),
        "nvrx_straggler": NVRxStragglerDetectionConfig(),
        "inprocess_restart": InProcessRestartConfig(),
        "tensor_inspect": TensorInspectConfig(),
    }
    packages.check_packages(config(**off))


def test_is_installed() -> None:
    assert packages.is_installed("torch")
    assert not packages.is_installed("no_such_module_here")
    with pytest.raises(ImportError):
        packages.nvrx("no_such_part")
