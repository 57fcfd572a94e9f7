"""Models of the users' TOML files: systems, test definitions, scenarios. Same keys and meaning as CloudAI's."""

from importlib import import_module
from typing import Any

from cloudai_mbridge.models.cmd_args import MegatronBridgeCmdArgs, ResolvedCmdArgs
from cloudai_mbridge.models.scenario import TestRun, TestScenario
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.models.test_definition import GitRepo, MetricsConfig, TestDefinition

__all__ = [
    "GitRepo",
    "LocalSystem",
    "MegatronBridgeCmdArgs",
    "MetricsConfig",
    "ResolvedCmdArgs",
    "SlurmSystem",
    "System",
    "TestDefinition",
    "TestRun",
    "TestScenario",
]


def __getattr__(name: str) -> Any:
    """Serve the model providers to scripts that were written for Megatron-Bridge; ImportError: not served here."""
    from cloudai_mbridge.training.upstream import missing
    from cloudai_mbridge.upstream.tables import MORE

    home = next((home for home, names in MORE["models"].items() if name in names.split()), None)
    if home is None and name.endswith(("Bridge", "Model", "Provider")):
        raise missing(__name__, name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"cloudai_mbridge.{home}"), name)
