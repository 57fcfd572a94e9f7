"""Find out before training starts whether the configured services can be used."""

import importlib.util
import sys
from typing import Any

from cloudai_mbridge.training.errors import ConfigError

# The setting that turns a service on, its package, and the name under which pip installs that
_SERVICES = (
    ("tensorboard_dir", "tensorboard", "tensorboard"),
    ("wandb_project", "wandb", "wandb"),
    ("mlflow_experiment", "mlflow", "mlflow"),
    ("comet_project", "comet_ml", "comet-ml"),
)


def check_loggers(cfg: Any) -> None:
    """Check, on every rank, what only the last one will need.

    Raises:
        ConfigError: a configured service's package is not installed, or W&B has no name for the run.
    """
    for setting, package, distribution in _SERVICES:
        value = getattr(cfg.logger, setting)
        if value and not _is_installed(package):
            raise ConfigError(
                f"logger.{setting}={value!r}: the package {package} is not installed; "
                f"pip install {distribution}, or leave logger.{setting} empty"
            )
    if cfg.logger.wandb_project and not cfg.logger.wandb_exp_name:
        raise ConfigError(
            f"logger.wandb_project={cfg.logger.wandb_project!r} needs a name for this run: set logger.wandb_exp_name"
        )


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None
