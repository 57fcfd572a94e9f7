"""Checkpoint contents of a model with adapters."""

from pathlib import Path
from typing import Any

from cloudai_mbridge.training.config.text.yaml_text import read_yaml
from cloudai_mbridge.training.errors import CheckpointError, ConfigError
from cloudai_mbridge.training.peft.config import AdapterConfig

_DECIDING = ("target_modules", "exclude_modules", "dim", "alpha")


def is_trained(key: str) -> bool:
    """Return whether an entry of the model changes while adapters are trained: theirs, and the experts' balance."""
    return ".adapter." in key or key.endswith(".router.expert_bias")


def check_adapters(directory: str, peft: AdapterConfig) -> None:
    """Check that a checkpoint contains the same adapters. Raises CheckpointError: they differ."""
    try:
        data = read_yaml(Path(directory) / "run_config.yaml")
    except (ConfigError, OSError):
        return  # of another program: the tensors are compared in any case
    saved: dict[str, Any] = (data or {}).get("peft") or {}
    if not saved:
        raise CheckpointError(f"{directory}: is a checkpoint without adapters; use it as pretrained_checkpoint")
    kind = str(saved.get("_target_", "")).rpartition(".")[2]
    there = {"kind": kind, **{name: saved.get(name) for name in _DECIDING}}
    here = {"kind": type(peft).__name__, **{name: getattr(peft, name) for name in _DECIDING}}
    if differing := [name for name in here if there[name] != here[name]]:
        name = differing[0]
        raise CheckpointError(f"{directory}: its adapters have {name} {there[name]!r}, this run's peft {here[name]!r}")
