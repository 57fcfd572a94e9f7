"""Optional packages: requirements of a configuration, and installed packages."""

import importlib
from importlib.util import find_spec
from typing import Any

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.provenance import is_installed
from cloudai_mbridge.training.schema.packages import NVRX, OF_EMERGING, for_optimizer, for_switches


def check_packages(cfg: ConfigContainer) -> None:
    """Refuse a configuration that needs a package which is not installed. Every rank calls it, before it starts.

    Raises ConfigError: the first such key, with the package and the remedy.
    """

    def get(section: str, name: str, default: Any) -> Any:
        return getattr(getattr(cfg, section), name, default)

    for message in for_switches(get, is_installed):
        raise ConfigError(message)
    name = cfg.optimizer.optimizer
    if name in ("adam", "sgd"):
        return
    where = f"optimizer.optimizer = {name!r}"
    if name not in OF_EMERGING:
        raise ConfigError(f"{where}: use one of adam, sgd, {', '.join(OF_EMERGING)}")
    if find_spec("megatron.core.optimizer.emerging_optimizers") is None:
        raise ConfigError(f"{where} needs Megatron-Core 0.18 or later, which needs Python 3.12; use 'adam'")
    for message in for_optimizer(get, is_installed):
        raise ConfigError(message)
    layer_wise = "optimizer.use_layer_wise_distributed_optimizer"
    is_layer_wise = getattr(cfg.optimizer, layer_wise.partition(".")[2], False)  # since Megatron-Core 0.18
    if (name == "dist_muon" or is_layer_wise) and not (cfg.optimizer.bf16 or cfg.optimizer.fp16):
        fact, other = (f"{layer_wise} = True", "False") if is_layer_wise else (where, "'muon'")
        raise ConfigError(f"{fact} trains in 16 bits only; use mixed_precision = 'bf16_mixed', or {other}")


def nvrx(part: str) -> Any:
    """Import a part of NVIDIA Resiliency Extension, such as "fault_tolerance".

    Raises ImportError: the package is not installed, or does not load on this machine.
    """
    return importlib.import_module(f"{NVRX}.{part}")
