"""Put this workload into CloudAI's registry, as `test_template_name = "MegatronBridgeEmbedded"`.

Call `register()` after CloudAI has registered its own systems. CloudAI's MegatronBridge stays what it is.
"""

from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.errors import ToolFailure

TEMPLATE = "MegatronBridgeEmbedded"
SYSTEM = "slurm"
_NEEDED = ("add_test_definition", "add_command_gen_strategy", "add_report", "systems_map", "test_definitions_map")


@dataclass(frozen=True)
class Registration:
    """Whether the workload is in CloudAI's registry, and one line about it. True in a condition if it is."""

    is_registered: bool
    message: str

    def __bool__(self) -> bool:
        return self.is_registered


def register() -> Registration:
    """Add test definition, Slurm command strategy and report to CloudAI's registry. Never raises; twice is once."""
    try:
        from cloudai.core import Registry

        from cloudai_mbridge.integrations import cloudai_workload as workload
    except ImportError as error:
        return Registration(False, f"CloudAI is not registered with: {error}; install NVIDIA's CloudAI 1.6 or newer")
    try:
        return _add(Registry(), workload)
    except Exception as error:  # another program's registry, of a version of its own
        return Registration(False, f"CloudAI is not registered with: {type(error).__name__}: {error}")


def _add(registry: Any, workload: Any) -> Registration:
    if missing := [name for name in _NEEDED if not hasattr(registry, name)]:
        raise ToolFailure(f"its registry has no {', '.join(missing)}; install CloudAI 1.6 or newer")
    if TEMPLATE in registry.test_definitions_map:
        return Registration(True, f"CloudAI has {TEMPLATE} already")
    if SYSTEM not in registry.systems_map:
        raise ToolFailure(f"it has no system {SYSTEM!r} yet; call register() after its own register_all()")
    definition = workload.EmbeddedTestDefinition
    registry.add_command_gen_strategy(registry.systems_map[SYSTEM], definition, workload.EmbeddedSlurmStrategy)
    registry.add_report(definition, workload.EmbeddedReport)
    registry.add_test_definition(TEMPLATE, definition)
    return Registration(True, f"CloudAI has {TEMPLATE} now")
