"""Ask a sandbox's Slurm, as any client would."""

import os
import re
import subprocess
from collections.abc import Mapping
from datetime import datetime

from tests.sandbox.errors import SandboxError
from tests.sandbox.host import search_path, without_job_variables
from tests.sandbox.layout import SandboxLayout

Argument = str | os.PathLike[str] | int


class Client:
    """Run Slurm's commands against one sandbox."""

    def __init__(self, layout: SandboxLayout) -> None:
        self.layout = layout

    @property
    def env(self) -> dict[str, str]:
        """Return what a client needs on top of os.environ."""
        return {"SLURM_CONF": str(self.layout.slurm_conf), "PATH": search_path(os.environ)}

    @property
    def full_env(self) -> dict[str, str]:
        """Return a client's whole environment: os.environ without any other Slurm job or cluster, and `env`."""
        return without_job_variables(os.environ) | self.env

    def run(
        self,
        *argv: Argument,
        check: bool = True,
        timeout: float | None = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a client of the cluster, by default in the sandbox directory.

        `env` adds to `full_env`.  With `check` a failure raises CalledProcessError, its stderr attached as a note;
        past `timeout` (s) TimeoutExpired.
        """
        done = subprocess.run(
            [str(argument) for argument in argv],
            env=self.full_env | dict(env or {}),
            cwd=cwd or self.layout.directory,
            input=stdin,
            timeout=timeout,
            text=True,
            errors="replace",
            capture_output=True,
            check=False,
        )
        if check and done.returncode:
            error = subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
            error.add_note(done.stderr.strip())  # CalledProcessError's own text lacks it
            raise error
        return done

    def node_states(self) -> dict[str, str]:
        """Return each node's state in sinfo's words: idle, mixed, allocated, down*, ...; `*` is "not responding"."""
        answer = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False)
        if answer.returncode:
            raise SandboxError(f"{self.layout.directory}: no node states: {answer.stderr.strip() or 'sinfo failed'}")
        # a node of several partitions has several, equal lines
        return dict(line.split(maxsplit=1) for line in answer.stdout.splitlines())

    def controller_answers(self) -> bool:
        """Tell whether slurmctld is up; quick also when it is not, unlike every other command."""
        return self.run("scontrol", "ping", check=False).stdout.rstrip().endswith("UP")

    def touch_a_job(self) -> bool:
        """Change nothing about one active job, which has slurmctld save all jobs soon; return False if none is active.

        `scontrol reconfigure` would do for finished jobs too, but from Slurm 23.11 on it replaces the process.
        """
        active = self.run("squeue", "--noheader", "--format=%A").stdout.split()
        updates = (("scontrol", "update", f"jobid={job}", "admincomment=") for job in active)
        return any(not self.run(*update, check=False).returncode for update in updates)  # some have just ended

    def jobs_saved_since(self, moment: float) -> bool:
        """Tell whether slurmctld has saved its jobs after this time, in seconds since the epoch."""
        try:
            return self.layout.job_state.stat().st_mtime >= moment
        except FileNotFoundError:  # none yet, or slurmctld is just putting a new one in its place
            return False

    def slurmd_started_at(self, node: str) -> float:
        """Return when the slurmd that the controller knows was started, in seconds since the epoch; 0 if it knows none.

        The controller's clock for this has whole seconds.
        """
        shown = self.run("scontrol", "show", "node", "--oneliner", node, check=False, env={"TZ": "UTC0"})
        found = re.search(r"SlurmdStartTime=(\d{4}-\S+)", shown.stdout)
        return datetime.fromisoformat(f"{found[1]}+00:00").timestamp() if found else 0.0
