"""The console script `mbridge-cloudai`: CloudAI's own command line, with MegatronBridgeEmbedded among its workloads.

Every argument is CloudAI's. `run` and `generate-report` end with exit code 1 if a point of ours failed; CloudAI itself
ends with 0.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from cloudai_mbridge.errors import POINTS_FAILED, ToolFailure
from cloudai_mbridge.integrations.cloudai import TEMPLATE, failed_points, register

_JUDGED = ("run", "generate-report")


def main() -> None:
    """Register the workload, then run CloudAI's `main`."""
    if not (registration := register()):
        print(f"error: {registration.message}", file=sys.stderr)
        sys.exit(ToolFailure.exit_code)
    from cloudai.cli import main as cloudai

    for name in _JUDGED:
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
