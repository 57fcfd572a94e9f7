"""Talk to Slurm through its commands."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.jobs import JobStatus, SubmitRefused
from cloudai_mbridge.launch.script import PYTHON_VARIABLE
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.slurm.parsing import (
    SQUEUE_FORMAT,
    parse_show_job,
    parse_squeue,
    parse_submitted,
    status_from_marker,
    without_slurm_variables,
)

COMMAND_TIMEOUT_S = 60


class SlurmClient:
    """The jobs of a Slurm cluster; SLURM_CONF of the environment says which."""

    def __init__(self, system: SlurmSystem) -> None:
        self._system = system

    def preflight(self) -> None:
        """Check that Slurm answers and has the partition."""
        found = self._run("sinfo", "--noheader", "--format=%R")
        if found.returncode != 0:
            raise ToolFailure(f"Slurm does not answer: {_last_line(found.stderr)}; check SLURM_CONF and the controller")
        partition, known = self._system.default_partition, sorted(set(found.stdout.split("\n")) - {""})
        if partition not in known:
            raise BadInput(
                f"system {self._system.name!r}: default_partition: Slurm has no partition {partition!r};"
                f" use one of {', '.join(known)}"
            )

    def submit(self, plan: RunPlan, directory: Path) -> str:
        """Submit with sbatch. Credentials and the interpreter travel in the environment only."""
        extra = {PYTHON_VARIABLE: sys.executable, **plan.secret_env}
        done = self._run(
            "sbatch", "--parsable", f"--chdir={directory}", POINT_FILES.slurm_script, cwd=directory, env=extra
        )
        job_id = parse_submitted(done.stdout)
        if "Unable to contact slurm controller" in done.stderr:  # nothing was submitted; worth another try
            raise ToolFailure(_last_line(done.stderr))
        if done.returncode != 0 or job_id is None:
            raise SubmitRefused(_last_line(done.stderr) or f"sbatch exited with {done.returncode} and said nothing")
        return job_id

    def poll(self, jobs: Mapping[str, Path]) -> dict[str, JobStatus]:
        """Ask squeue once for all jobs, and scontrol for the ones that have ended."""
        if not jobs:
            return {}
        listed = self._run(
            "squeue", "--noheader", "--states=all", f"--format={SQUEUE_FORMAT}", f"--jobs={','.join(jobs)}"
        )
        if listed.returncode != 0 and "Invalid job id" not in listed.stderr:
            raise ToolFailure(f"squeue failed: {_last_line(listed.stderr)}")
        seen = parse_squeue(listed.stdout)
        return {
            job_id: seen[job_id] if job_id in seen and not seen[job_id].is_final else self._ended(job_id, directory)
            for job_id, directory in jobs.items()
        }

    def _ended(self, job_id: str, directory: Path) -> JobStatus:
        shown = self._run("scontrol", "--oneliner", "show", "job", job_id)
        if (status := parse_show_job(shown.stdout)) is not None:
            return status
        if shown.returncode != 0 and "Invalid job id" not in shown.stderr:
            raise ToolFailure(f"scontrol failed: {_last_line(shown.stderr)}")
        marker = directory / POINT_FILES.exit_code
        return status_from_marker(marker.read_text() if marker.exists() else None)

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Cancel the jobs; ones that have ended are not an error."""
        if ids := list(job_ids):
            self._run("scancel", *ids)

    def _run(
        self, *argv: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        full_env = {**without_slurm_variables(os.environ), **(env or {})}
        try:
            return subprocess.run(
                argv,
                cwd=cwd,
                env=full_env,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
                start_new_session=True,  # Ctrl-C is for mbridge: an sbatch must not die between asking and answering
            )
        except FileNotFoundError:
            raise ToolFailure(f"{argv[0]} is not installed here; run on a Slurm login node") from None
        except subprocess.TimeoutExpired:
            raise ToolFailure(f"{argv[0]} did not answer within {COMMAND_TIMEOUT_S} s") from None


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
