"""The life of a sandbox: start, use, break, stop."""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.sandbox import daemons, host, node, prepare, processes
from tests.sandbox.client import Client
from tests.sandbox.conf import SandboxSpec, Site
from tests.sandbox.errors import SandboxError
from tests.sandbox.fleet import CONTROL_TIMEOUT_S, Fleet, read_state
from tests.sandbox.layout import SandboxLayout

START_TIMEOUT_S = 30.0
REGISTRATION_TIMEOUT_S = 60.0  # of a slurmd that was killed, on a busy machine


class SlurmSandbox(Client):
    """Run a private Slurm cluster in `directory`; see `SandboxSpec` for what the options mean.

    The directory must be new, empty or a stopped sandbox's, and its path short (see `layout.check_directory`).  What
    runs is written down in it, so any later process can `load` the sandbox and stop it.  With `die_with_parent` the
    daemons also stop when the thread that called `start` ends, however it ends.

    Methods raise `SandboxError` with the reason and the remedy.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        nodes: int = 2,
        gpus: int = 4,
        *,
        die_with_parent: bool = False,
        **options: Any,
    ) -> None:
        """Describe the cluster; nothing is started or written yet. options: further fields of `SandboxSpec`."""
        super().__init__(SandboxLayout(Path(directory).resolve()))
        self.spec = SandboxSpec(nodes=nodes, gpus=gpus, **options)
        self.die_with_parent = die_with_parent
        self._fleet = Fleet(self.layout)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """Return the sandbox that was started in `directory`, by whichever process."""
        sandbox = cls(directory)
        sandbox.spec = read_state(sandbox.layout.state_file).spec
        return sandbox

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the cluster, keep its directory."""
        self.stop()

    # ---- what it is

    @property
    def directory(self) -> Path:
        return self.layout.directory

    @property
    def node_names(self) -> list[str]:
        return self.spec.node_names

    @property
    def is_running(self) -> bool:
        """Tell whether any daemon of the sandbox is alive."""
        return any(self.daemons().values())

    def daemons(self) -> dict[str, bool]:
        """Return every daemon that was started, by name, and whether it is alive; `node-NAME` is NAME's supervisor."""
        return self._fleet.alive()

    # ---- start and stop

    def start(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Start all daemons and wait until every node is idle; stop them again if that fails.

        A stopped sandbox's jobs and job ids are still there after a new start in its directory.
        """
        if self.is_running:
            raise SandboxError(
                f"{self.directory}: a sandbox is already running here; "
                f"stop it with: python -m tests.sandbox stop {self.directory}"
            )
        prepare.check(self.spec, self.layout)
        namespaces = host.namespace_argv() if self.spec.hostnames else []
        try:
            site = prepare.write(self.spec, self.layout)
            self._spawn("munged", daemons.munged_argv(self.layout))
            self._fleet.wait("munged's socket", self.layout.munge_socket.exists, 10.0, "munged")
            if self.spec.accounting:
                self._start_accounting(site)
            self.start_controller(timeout_s)
            self._start_nodes(namespaces, timeout_s)
        except BaseException:
            self.stop()
            raise
        return self

    def _spawn(self, name: str, argv: list[str], env: Mapping[str, str] | None = None) -> None:
        self._fleet.spawn(name, argv, {**self.full_env, **(env or {})}, self.die_with_parent)

    def _start_accounting(self, site: Site) -> None:
        layout, user = self.layout, site.user
        if not layout.mysql_data.exists():
            installed = self.run(*daemons.mariadb_install_argv(layout, user), check=False, timeout=120)
            if installed.returncode:
                raise SandboxError(f"the accounting database was not created: {installed.stdout}{installed.stderr}")
        self._spawn("mariadbd", daemons.mariadbd_argv(layout, user))
        grant = daemons.mariadb_grant_argv(layout, user)
        self._fleet.wait("mariadbd", lambda: self.run(*grant, check=False).returncode == 0, START_TIMEOUT_S, "mariadbd")
        self._spawn("slurmdbd", daemons.slurmdbd_argv(), {"MYSQL_UNIX_PORT": str(layout.mysql_socket)})
        self._fleet.wait("slurmdbd", lambda: host.is_listening(site.ports[1]), START_TIMEOUT_S, "slurmdbd")

    def _start_nodes(self, namespaces: list[str], timeout_s: float) -> None:
        parent = os.getpid() if self.die_with_parent else 0
        for name in self.node_names:
            self._spawn(f"node-{name}", daemons.node_argv(self.layout, name, namespaces=namespaces, parent=parent))
        supervisors = (f"node-{name}" for name in self.node_names)
        self._fleet.wait(
            "all nodes idle",
            lambda: set(self._states_by_now().values()) == {"idle"},
            timeout_s,
            "slurmctld",
            *supervisors,
        )

    def _states_by_now(self) -> dict[str, str]:
        """Return the nodes' states; none while the controller is too busy to answer, which is then asked again."""
        with suppress(SandboxError):
            return self.node_states()
        return {}

    def stop(self, purge: bool = False) -> None:
        """Stop everything the sandbox runs, jobs included; with `purge` remove its directory too.

        Does nothing if nothing runs.  Works for whatever an earlier process, also a crashed one, left behind.
        """
        if not self.layout.state_file.exists():
            return
        started = read_state(self.layout.state_file).spec  # which may differ from this object's
        self._cancel_jobs()
        self._fleet.end()
        if started.cgroup:
            host.remove_cgroups(started.node_names)
        if purge:
            shutil.rmtree(self.directory)

    def _cancel_jobs(self) -> None:
        """Cancel all jobs, so that waiting clients end and a later start does not find them running."""
        if self.daemons().get("slurmctld"):
            with suppress(subprocess.TimeoutExpired):  # a controller that does not answer is ended like any other
                self.run("scancel", "--user", prepare.user_name(), check=False, timeout=10)

    # ---- break and repair

    def crash(self, name: str) -> None:
        """Take the power from a node: slurmd, its steps and their tasks are gone at once."""
        self._check_node(name)
        self._fleet.control_node(name, node.CRASH, node.CRASHED)

    def kill_slurmd(self, name: str) -> None:
        """Kill a node's slurmd only; running steps go on."""
        self._check_node(name)
        self._fleet.control_node(name, node.KILL_SLURMD, node.DOWN, node.CRASHED)

    def revive(self, name: str) -> None:
        """Start a node's slurmd again, after a crash as a rebooted node; return once the controller knows of it.

        A reboot takes two seconds at least, for the controller would not notice a shorter one.
        After `crash` the node comes back down, "Node unexpectedly rebooted", as real nodes do: `resume` it.
        """
        self._check_node(name)
        has_controller = self.daemons().get("slurmctld", False)
        before = self.slurmd_started_at(name) if has_controller else 0.0
        if self._fleet.control_node(name, node.REVIVE, node.UP) and has_controller:
            self._fleet.wait(
                f"{name} registered", lambda: self.slurmd_started_at(name) > before, REGISTRATION_TIMEOUT_S
            )

    def resume(self, name: str) -> None:
        """Return a down or drained node to service and wait until it takes jobs."""
        self._check_node(name)

        def is_in_service() -> bool:
            state = self._states_by_now().get(name, "")
            if state.startswith(("down", "drain", "fail")):
                self.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
                return False
            return not state.endswith("*")

        self._fleet.wait(f"{name} in service (revive it first if it is dead)", is_in_service, CONTROL_TIMEOUT_S)

    def kill_controller(self, save: bool = True) -> None:
        """Kill slurmctld with SIGKILL; nodes and running jobs go on.

        slurmctld saves jobs late: a submit after up to 5 s, a start by the backfill scheduler only with the next other
        event.  What it has not saved it forgets, and after its restart it aborts the jobs whose start it has forgotten.
        With `save` it is first made to save, if a job is active, as it would have on a cluster where more happens.
        """
        controller = self._fleet.find("slurmctld")
        now = time.time()
        if save and self.touch_a_job():
            self._fleet.wait("slurmctld's save", lambda: self.jobs_saved_since(now), CONTROL_TIMEOUT_S)
        processes.kill_tree([controller])  # a tree, for it has a helper, slurmscriptd

    def start_controller(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start slurmctld, unless it runs, and wait until it answers; nodes may stay `unknown` for some seconds."""
        if not self.daemons().get("slurmctld"):
            self._spawn("slurmctld", daemons.slurmctld_argv(self.layout))
        self._fleet.wait("slurmctld answering", self.controller_answers, timeout_s, "slurmctld")

    def _check_node(self, name: str) -> None:
        if name not in self.node_names:
            raise SandboxError(f"{name}: no such node; the nodes are {' '.join(self.node_names)}")
