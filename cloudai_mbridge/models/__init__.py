"""What users write: systems, test definitions, scenarios. Same keys and meaning as CloudAI's."""

from importlib import import_module
from typing import Any

from cloudai_mbridge.models.cmd_args import MegatronBridgeCmdArgs, ResolvedCmdArgs
from cloudai_mbridge.models.scenario import Scenario, TestRun
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.models.test_definition import GitRepo, MegatronBridgeTestDefinition, MetricsConfig

__all__ = [
    "GitRepo",
    "LocalSystem",
    "MegatronBridgeCmdArgs",
    "MegatronBridgeTestDefinition",
    "MetricsConfig",
    "ResolvedCmdArgs",
    "Scenario",
    "SlurmSystem",
    "System",
    "TestRun",
]

_PROVIDERS = ("GPTModelProvider", "MLAModelProvider")


def __getattr__(name: str) -> Any:
    """Serve the model providers to scripts that were written for Megatron-Bridge; ImportError: it is not here."""
    if name in _PROVIDERS:
        return getattr(import_module("cloudai_mbridge.training.models.gpt_provider"), name)
    if name == "AutoBridge" or name.endswith("Provider"):
        raise ImportError(f"cloudai_mbridge has no {name} of Megatron-Bridge's models; use {' or '.join(_PROVIDERS)}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
