"""What users write: systems, test definitions, scenarios. Same keys and meaning as CloudAI's."""

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
