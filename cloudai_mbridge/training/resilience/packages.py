"""Optional packages: what a configuration needs and what is installed."""

import importlib
import importlib.util
from typing import Any

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.errors import ConfigError

NVRX = "nvidia_resiliency_ext"
_NVRX_PROJECT = "nvidia-resiliency-ext"


def check_packages(cfg: ConfigContainer) -> None:
    """Refuse a configuration that asks for a package which is not installed. Every rank calls it, before it starts.

    Raises:
        ConfigError: the first such key, with the package and what to do.
    """
    if cfg.ft is not None and cfg.ft.enable_ft_package:
        _require("ft.enable_ft_package", NVRX, _NVRX_PROJECT)
    if cfg.nvrx_straggler is not None and cfg.nvrx_straggler.enabled:
        _require("nvrx_straggler.enabled", NVRX, _NVRX_PROJECT)
    if cfg.inprocess_restart is not None and cfg.inprocess_restart.enabled:
        _require("inprocess_restart.enabled", NVRX, _NVRX_PROJECT)
    if cfg.logger.log_energy:
        _require("logger.log_energy", "pynvml", "nvidia-ml-py")


def is_installed(module: str) -> bool:
    """Tell whether `module` can be found, without importing it."""
    return importlib.util.find_spec(module) is not None


def nvrx(part: str) -> Any:
    """Import a part of NVIDIA Resiliency Extension, such as "fault_tolerance".

    Raises:
        ImportError: the package is not installed, or does not load on this machine.
    """
    return importlib.import_module(f"{NVRX}.{part}")


def _require(key: str, module: str, project: str) -> None:
    if not is_installed(module):
        raise ConfigError(
            f"{key}=true needs the Python package {project}, which is not installed: "
            f"run `pip install {project}` in the job's environment, or set {key}=false"
        )
