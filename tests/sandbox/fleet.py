"""The sandbox's daemons, whichever process started them: the state file says which there are."""

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.sandbox import node, processes
from tests.sandbox.conf import SandboxSpec
from tests.sandbox.errors import SandboxError
from tests.sandbox.layout import SandboxLayout
from tests.sandbox.processes import Process

CONTROL_TIMEOUT_S = 20.0  # for a daemon to do as told; usually well below a second
LOG_TAIL_LINES = 10


@dataclass(frozen=True)
class SandboxState:
    """Say what was started, by daemon name: munged, slurmctld, ..., and node-NAME for a node's supervisor."""

    spec: SandboxSpec
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
    known = {name: Process(**process) for name, process in raw["processes"].items()}
    return SandboxState(SandboxSpec(**raw["spec"]), known)


def read_state(path: Path) -> SandboxState:
    """Read the state file, or say that its directory is not a sandbox."""
    try:
        return parse_state(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise SandboxError(
            f"{path.parent}: not a sandbox directory (no {path.name}); "
            f"start one with: python -m tests.sandbox start {path.parent}"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SandboxError(f"{path}: not a sandbox's state file ({error!r}); remove the directory") from None


def write_state(path: Path, state: SandboxState) -> None:
    """Replace the state file in one piece: a reader sees the old one or the new one."""
    draft = path.with_suffix(".tmp")
    draft.write_text(render_state(state))
    draft.replace(path)


class Fleet:
    """Start, find, steer and end daemons; the name of a node's supervisor is `node-NAME`."""

    def __init__(self, layout: SandboxLayout) -> None:
        self.layout = layout  # its state file is read anew every time

    def alive(self) -> dict[str, bool]:
        """Return every daemon that was started, and whether it is alive."""
        if not self.layout.state_file.exists():
            return {}
        recorded = read_state(self.layout.state_file).processes
        return {name: processes.is_alive(process) for name, process in recorded.items()}

    def find(self, name: str) -> Process:
        """Return a daemon that is alive, or say that it is not."""
        process = read_state(self.layout.state_file).processes.get(name)
        if process is None or not processes.is_alive(process):
            command = "start-controller" if name == "slurmctld" and any(self.alive().values()) else "start"
            raise SandboxError(
                f"{self.layout.directory}: {name} is not running; "
                f"try: python -m tests.sandbox {command} {self.layout.directory}"
            )
        return process

    def spawn(self, name: str, argv: list[str], env: Mapping[str, str], die_with_parent: bool) -> None:
        """Start a daemon and write it down."""
        process = processes.spawn(
            argv,
            cwd=self.layout.directory,
            env={**env, processes.MARKER: str(self.layout.directory)},
            log=self.layout.logs / f"{name}.out",
            die_with_parent=die_with_parent,
        )
        write_state(self.layout.state_file, read_state(self.layout.state_file).with_process(name, process))

    def control_node(self, name: str, number: signal.Signals, *wanted: str) -> bool:
        """Have a node's supervisor do something and wait until it is done; return False if there was nothing to do.

        One signal at a time: of two that wait, the kernel delivers the lower number first and not the older.
        """
        supervisor = self.find(f"node-{name}")
        status = self.layout.node_status(name)
        if status.read_text() in wanted:
            return False
        processes.send(supervisor, number)
        self.wait(f"{name} {wanted[0]}", lambda: status.read_text() in wanted, CONTROL_TIMEOUT_S)
        return True

    def end(self) -> None:
        """End every daemon and whatever else belongs to the sandbox: nodes first, what they need last."""
        running = read_state(self.layout.state_file).processes
        processes.end(process for name, process in running.items() if name.startswith("node-"))
        for name in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
            processes.end([running[name]] if name in running else [])
        processes.kill_strays(self.layout.directory)

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float, *needed: str) -> None:
        """Wait for a condition; give up, with the ends of the logs, when a needed daemon dies or the time is over."""
        dead: list[str] = []

        def is_settled() -> bool:
            if condition():
                return True
            alive = self.alive()
            dead.extend(name for name in needed if not alive.get(name) or self._has_lost_slurmd(name))
            return bool(dead)

        if not processes.wait_until(is_settled, timeout_s) or dead:
            reason = f"{dead[0]} died" if dead else f"{what}: not within {timeout_s:g} s"
            raise SandboxError(f"{self.layout.directory}: {reason}\n{_log_tails(self.layout.logs)}".rstrip())

    def _has_lost_slurmd(self, name: str) -> bool:
        status = self.layout.node_status(name.removeprefix("node-"))
        return status.exists() and status.read_text() != node.UP


def _log_tails(folder: Path) -> str:
    """Return the last lines of every log, under its name."""
    tails = []
    for path in sorted(folder.glob("*")):
        if lines := path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]:
            tails.append("\n".join((f"--- {path}", *lines)))
    return "\n".join(tails)
