"""Put this workload into CloudAI's registry, as `test_template_name = "MegatronBridgeEmbedded"`.

The console script `mbridge-cloudai` does it and then runs CloudAI's own command line, with CloudAI's arguments. Its
`run` and `generate-report` end with exit code 1 if a point of ours failed; CloudAI itself ends with 0. A program that
uses CloudAI as a library calls `register()`. CloudAI's MegatronBridge is unchanged.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.errors import POINTS_FAILED, ToolFailure
from cloudai_mbridge.integrations.cloudai_point import TEMPLATE, failed_points

__all__ = ["TEMPLATE", "Registration", "failed_points", "register"]

_NEEDED = (
    *("add_test_definition", "add_command_gen_strategy", "add_report", "update_runner"),
    *("systems_map", "runners_map", "test_definitions_map"),
)


@dataclass(frozen=True)
class Registration:
    """Whether the workload is in CloudAI's registry, and one line about it. True in a condition if it is."""

    is_registered: bool
    message: str

    def __bool__(self) -> bool:
        return self.is_registered


def register() -> Registration:
    """Add test definition, commands and report to CloudAI's registry. Never raises; idempotent."""
    try:
        from cloudai.core import Registry

        from cloudai_mbridge.integrations import cloudai_workload
    except ImportError as error:
        return Registration(False, f"cannot register with CloudAI: {error}; install NVIDIA's CloudAI 1.6 or newer")
    try:
        return _add(Registry(), cloudai_workload)
    except Exception as error:  # another program's registry, of a version of its own
        return Registration(False, f"cannot register with CloudAI: {type(error).__name__}: {error}")


def _add(registry: Any, workload: Any) -> Registration:
    if missing := [name for name in _NEEDED if not hasattr(registry, name)]:
        raise ToolFailure(f"its registry has no {', '.join(missing)}; install CloudAI 1.6 or newer")
    if TEMPLATE in registry.test_definitions_map:
        return Registration(True, f"{TEMPLATE} is already registered")
    definition = workload.EmbeddedTestDefinition
    for name, strategy in (
        ("slurm", workload.EmbeddedSlurmStrategy),
        ("standalone", workload.EmbeddedStandaloneStrategy),
    ):
        if name not in registry.systems_map or name not in registry.runners_map:
            raise ToolFailure(f"it has no system {name!r} yet; call register() after its own register_all()")
        registry.add_command_gen_strategy(registry.systems_map[name], definition, strategy)
    for name, runner in list(registry.runners_map.items()):
        registry.update_runner(name, workload.checked(runner))
    registry.add_report(definition, workload.EmbeddedReport)
    registry.add_test_definition(TEMPLATE, definition)
    return Registration(True, f"{TEMPLATE} is registered")


def main() -> None:
    """Register the workload, then run CloudAI's `main`."""
    if not (registration := register()):
        print(f"error: {registration.message}", file=sys.stderr)
        sys.exit(ToolFailure.exit_code)
    from cloudai.cli import main as cloudai

    for name in ("run", "generate-report"):
        command = cloudai.commands[name]
        command.callback = _by_verdict(command.callback)
    cloudai()


def _by_verdict(callback: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(callback)
    def run(**options: Any) -> None:
        try:
            callback(**options)
        except SystemExit as end:
            if not end.code and (failed := sorted(path for path, is_failed in failed_points.items() if is_failed)):
                said = f"{TEMPLATE}: {len(failed)} of {len(failed_points)} points failed"
                print("\n  ".join([said, *failed]), file=sys.stderr)
                sys.exit(POINTS_FAILED)
            raise

    return run


if __name__ == "__main__":
    main()
