"""The state file: what a sandbox is and which processes it runs, for the processes that come later."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cloudai_mbridge.sandbox.conf import SandboxSpec
from cloudai_mbridge.sandbox.errors import SandboxError
from cloudai_mbridge.sandbox.processes import Process


@dataclass(frozen=True)
class SandboxState:
    """Say what was started, by daemon name: munged, slurmctld, ..., and node-NAME for a node's supervisor."""

    spec: SandboxSpec
    ports: tuple[int, ...] = ()
    processes: Mapping[str, Process] = field(default_factory=dict)

    def with_process(self, name: str, process: Process) -> "SandboxState":
        """Return the state with one more daemon."""
        return replace(self, processes={**self.processes, name: process})


def render_state(state: SandboxState) -> str:
    """Return the state as JSON."""
    return json.dumps(asdict(state), indent=1) + "\n"


def parse_state(text: str) -> SandboxState:
    """Return the state that `render_state` wrote; raise ValueError, TypeError or KeyError for anything else."""
    raw = json.loads(text)
    processes = {name: Process(**process) for name, process in raw["processes"].items()}
    return SandboxState(SandboxSpec(**raw["spec"]), tuple(raw["ports"]), processes)


def read_state(path: Path) -> SandboxState:
    """Read the state file, or say that its directory is not a sandbox."""
    try:
        return parse_state(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise SandboxError(
            f"{path.parent}: not a sandbox directory (no {path.name}); "
            f"start one with: python -m cloudai_mbridge.sandbox start {path.parent}"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SandboxError(f"{path}: not a sandbox's state file ({error!r}); remove the directory") from None


def write_state(path: Path, state: SandboxState) -> None:
    """Replace the state file in one piece: a reader sees the old one or the new one."""
    draft = path.with_suffix(".tmp")
    draft.write_text(render_state(state))
    draft.replace(path)
