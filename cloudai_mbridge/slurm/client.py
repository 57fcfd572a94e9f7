"""Talk to Slurm through its commands."""

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.jobs import JobClass, JobStatus, Submission
from cloudai_mbridge.models.node_state import is_out_of_service
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.regular_file import NotRegular, read_regular
from cloudai_mbridge.slurm import submit
from cloudai_mbridge.slurm.command import run
from cloudai_mbridge.slurm.parsing import (
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    Listed,
    parse_sacct,
    parse_squeue,
    parse_started,
    status_from_marker,
)

SACCT_TIMEOUT_S = 20.0
SACCT_PAUSE_S = 60.0
_QUICK_S = 10.0
_ARGUMENTS = 500  # job ids in one command line
_DEFAULT_MAX_ARRAY_SIZE = 1001


def has_gpu_gres() -> bool | None:
    """Return whether Slurm knows GPUs as a generic resource; None where it cannot be asked."""
    try:
        shown = run("scontrol", "show", "config", timeout_s=_QUICK_S)
    except ToolFailure:
        return None
    types = re.search(r"^GresTypes\s*=(.*)", shown.stdout, re.MULTILINE)
    return "gpu" in types[1] if types and shown.returncode == 0 else None


class SlurmClient:
    """The jobs of a Slurm cluster; SLURM_CONF of the environment says which."""

    def __init__(self, system: SlurmSystem) -> None:
        self._system = system
        self._max_array_size: int | None = None
        self._has_accounting = True
        self._ask_sacct_after = 0.0
        self._sacct_trouble = ""

    def preflight(self) -> None:
        """Check that Slurm answers and has the partition."""
        found = run("sinfo", "--noheader", "--format=%R")
        if found.returncode != 0:
            raise ToolFailure(f"Slurm does not answer: {found.complaint}; check SLURM_CONF and the controller")
        partition, known = self._system.default_partition, sorted(set(found.stdout.split("\n")) - {""})
        if partition not in known:
            raise BadInput(
                f"system {self._system.name!r}: default_partition: Slurm has no partition {partition!r};"
                f" use one of {', '.join(known)}"
            )

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        """Put the runs of one array together, as far as the cluster allows indices."""
        if self._max_array_size is None and any(planned.array for planned in runs):
            shown = run("scontrol", "show", "config")
            found = re.search(r"^MaxArraySize\s*=\s*(\d+)", shown.stdout, re.MULTILINE)
            size = int(found[1]) if found else _DEFAULT_MAX_ARRAY_SIZE
            if shown.returncode != 0:  # it is asked again
                return submit.batches(runs, size)
            self._max_array_size = size
        return submit.batches(runs, self._max_array_size or 0)

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        """Submit with sbatch."""
        return submit.submit(submission, root, self._system.extra_transient_status_errors)

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        """Look for the tokens among the names of all jobs, and in what the jobs' scripts left behind."""
        listed = self._list()
        found = {}
        for submission in submissions:
            mark = f".{submission.token}"
            ids = [job.job_id for job in listed.values() if job.name.endswith(mark)]
            for planned in submission.runs:
                started = _started(root / planned.key)
                if started.get("name", "").endswith(mark):
                    found[planned.key] = started["job"]
                for job_id in ids:
                    if "_" not in job_id or job_id.endswith(f"_{planned.array_index}"):
                        found[planned.key] = job_id
        return found

    def poll(self, jobs: Mapping[str, Path]) -> dict[str, JobStatus]:
        """Ask squeue once for all jobs, and sacct once for those that it does not know any more."""
        if not jobs:
            return {}
        listed = self._list()
        seen = {job_id: listed[job_id].status for job_id in jobs if job_id in listed}
        if gone := {job_id: path for job_id, path in jobs.items() if job_id not in seen}:
            accounted = self._account(gone)
            arrays = {job_id.partition("_")[0] for job_id in listed}
            for job_id, path in gone.items():
                is_listed = job_id.partition("_")[0] in arrays
                seen[job_id] = accounted.get(job_id) or self._by_marker(job_id, path, is_listed)
        return seen

    def _list(self) -> dict[str, Listed]:
        """Return all jobs of this user that the controller remembers, ended ones included."""
        answer = run(
            *("squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}"),
            *("--Format", SQUEUE_FORMAT),
        )
        if answer.returncode != 0:
            raise ToolFailure(f"squeue failed: {answer.complaint}")
        return parse_squeue(answer.stdout)

    def _account(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        """Return the jobs whose end the accounting knows. It is no failure if it does not answer: there are markers."""
        if not self._has_accounting or time.monotonic() < self._ask_sacct_after:
            return {}
        ids = ",".join(sorted({job_id.partition("_")[0] for job_id in job_ids}))
        argv = ("sacct", "--noheader", "--parsable2", "--allocations", f"--format={SACCT_FORMAT}", f"--jobs={ids}")
        self._sacct_trouble = ""
        try:
            answer = run(*argv, timeout_s=SACCT_TIMEOUT_S)
        except ToolFailure as error:
            self._sacct_trouble = str(error)
        else:
            self._has_accounting = "accounting storage is disabled" not in answer.stderr
            if answer.returncode == 0:
                known = parse_sacct(answer.stdout)
                return {job_id: status for job_id, status in known.items() if status.is_final}
            if self._has_accounting:
                self._sacct_trouble = f"sacct failed: {answer.complaint}"
        self._ask_sacct_after = time.monotonic() + SACCT_PAUSE_S
        return {}

    def _by_marker(self, job_id: str, directory: Path, is_array_listed: bool) -> JobStatus:
        """Judge a job that is not listed by what its script left behind."""
        trouble = f"; {self._sacct_trouble}" if self._sacct_trouble else ""
        started = _started(directory)
        if started.get("job") != job_id:
            if is_array_listed:  # a task that is cancelled while it waits vanishes from its array without a row
                return JobStatus("CANCELLED", JobClass.CANCELLED, reason="it had not started", run_time_s=0.0)
            reason = f"Slurm does not know the job, and it has never started{trouble}"
            return JobStatus("NEVER_STARTED", JobClass.UNKNOWN, reason=reason)
        status = status_from_marker(_read(directory / POINT_FILES.exit_code), started.get("nodes", ""))
        return JobStatus(**{**vars(status), "reason": status.reason + trouble})

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Cancel the jobs; ones that have ended are not an error."""
        ids = list(job_ids)
        for start in range(0, len(ids), _ARGUMENTS):
            answer = run("scancel", *ids[start : start + _ARGUMENTS])
            if answer.returncode != 0 and "Invalid job id" not in answer.stderr:
                raise ToolFailure(f"scancel failed: {answer.complaint}")

    def sick_nodes(self, nodes: str) -> dict[str, str]:
        """Ask sinfo which of the nodes are out of service."""
        return {
            name: f"{state} ({reason})" if reason not in ("none", "") else state
            for name, state, reason in self._nodes(f"--nodes={nodes}")
            if is_out_of_service(state)
        }

    def num_usable_nodes(self, exclude: Iterable[str]) -> int | None:
        """Count the partition's nodes that are not excluded; ones out of service may come back, and Slurm waits."""
        rows = self._nodes(f"--partition={self._system.default_partition}")
        return len({name for name, _, _ in rows} - set(exclude)) if rows else None

    def _nodes(self, option: str) -> list[tuple[str, str, str]]:
        answer = run("sinfo", "--noheader", "--Node", option, "--format=%N|%T|%E")
        rows = (tuple(line.split("|", 2)) for line in answer.stdout.splitlines())
        return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def node_states(partition: str) -> dict[str, str] | None:
    """Return the states of a partition's nodes; None where Slurm does not answer."""
    try:
        answer = run("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N|%T")
    except ToolFailure:
        return None
    rows = [line.split("|", 1) for line in answer.stdout.splitlines() if "|" in line]
    return None if answer.returncode else {row[0]: row[1] for row in rows}


def _started(directory: Path) -> dict[str, str]:
    return parse_started(_read(directory / POINT_FILES.started) or "")


def _read(path: Path) -> str | None:
    try:
        return read_regular(path).decode(errors="replace")
    except (FileNotFoundError, NotRegular):
        return None
