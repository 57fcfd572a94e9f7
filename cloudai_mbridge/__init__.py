"""Describe, sweep, check, run and judge LLM-training benchmarks with Megatron-Core."""

from typing import TYPE_CHECKING, Any

from cloudai_mbridge.version import __version__ as __version__

if TYPE_CHECKING:
    from cloudai_mbridge.integrations.workload import JobStatusResult as JobStatusResult
    from cloudai_mbridge.integrations.workload import MegatronBridgeCmdArgs as MegatronBridgeCmdArgs
    from cloudai_mbridge.integrations.workload import MegatronBridgeTestDefinition as MegatronBridgeTestDefinition
    from cloudai_mbridge.integrations.workload import extract_mbridge_metrics as extract_mbridge_metrics

_WORKLOAD = ("JobStatusResult", "MegatronBridgeCmdArgs", "MegatronBridgeTestDefinition", "extract_mbridge_metrics")


def __getattr__(name: str) -> Any:
    """Import the workload when one of its names is asked for: the training process needs none of it."""
    if name in _WORKLOAD:
        from cloudai_mbridge.integrations import workload

        return getattr(workload, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
