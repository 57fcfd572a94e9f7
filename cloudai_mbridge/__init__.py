"""Describe, sweep, check, run and judge LLM-training benchmarks with Megatron-Core.

`import cloudai_mbridge as mb` is the API for notebooks (docs/scripting.md).
"""

from typing import TYPE_CHECKING, Any

from cloudai_mbridge import upstream
from cloudai_mbridge.version import __version__

if TYPE_CHECKING:
    from cloudai_mbridge.api import (
        BadInput,
        Gate,
        Layouts,
        MBridgeError,
        Plan,
        Report,
        Run,
        Scenario,
        Table,
        compare_runs,
        gate_runs,
        load,
        open_run,
        rank_layouts,
    )
    from cloudai_mbridge.integrations.workload import (
        JobStatusResult,
        MegatronBridgeCmdArgs,
        MegatronBridgeTestDefinition,
        extract_mbridge_metrics,
    )

_WORKLOAD = ("JobStatusResult", "MegatronBridgeCmdArgs", "MegatronBridgeTestDefinition", "extract_mbridge_metrics")

__all__ = [
    "BadInput",
    "Gate",
    "JobStatusResult",
    "Layouts",
    "MBridgeError",
    "MegatronBridgeCmdArgs",
    "MegatronBridgeTestDefinition",
    "Plan",
    "Rehearsal",
    "Report",
    "Run",
    "Scenario",
    "Table",
    "__version__",
    "compare_runs",
    "extract_mbridge_metrics",
    "gate_runs",
    "load",
    "open_run",
    "rank_layouts",
]


if not TYPE_CHECKING:  # for a type checker it would be any name

    def __getattr__(name: str) -> Any:
        """Import a name when it is asked for: the training process needs none of them."""
        if name not in __all__:
            from cloudai_mbridge.training.upstream import missing

            raise missing(__name__, name)
        if name in _WORKLOAD:
            from cloudai_mbridge.integrations import workload

            return getattr(workload, name)
        from cloudai_mbridge import api

        return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


upstream.install()
