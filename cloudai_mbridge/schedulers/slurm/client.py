"""Talk to Slurm through its commands."""

import math
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.files.regular import NotRegular, read_regular
from cloudai_mbridge.launch.claim import LOST_CLAIM, SIXTEEN_HEX, claimed_by
from cloudai_mbridge.launch.script import slug
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.models.values.hostlist import is_out_of_service
from cloudai_mbridge.models.values.time_limit import format_time_limit
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.schedulers.interface import NEVER_STARTED, Job, JobClass, JobStatus, Seen, Submission
from cloudai_mbridge.schedulers.slurm import submit
from cloudai_mbridge.schedulers.slurm.command import Answer, run_command
from cloudai_mbridge.schedulers.slurm.parsing import (
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    Listed,
    parse_sacct,
    parse_squeue,
    parse_started,
    status_from_marker,
)
from cloudai_mbridge.schedulers.slurm.partitions import allowed_s

SACCT_TIMEOUT_S = 20.0
SACCT_PAUSE_S = 60.0
GHOST_S = 10.0  # how long a job may be listed as running after its script has ended
VANISHED_S = 20.0  # how long a waiting task may be missing beside others of its array before it counts as cancelled
_QUICK_S = 10.0
# sinfo takes --all, without which hidden partitions are left out, or --partition, and not both
_SINFO_NODES = ("sinfo", "--all", "--noheader", "--Node", "--format=%R|%N|%T|%E")
_ARGUMENTS = 500  # job ids in one command line
_DEFAULT_MAX_ARRAY_SIZE = 1001
_TOKEN = re.compile(SIXTEEN_HEX)


def has_gpu_gres() -> bool | None:
    """Return whether Slurm knows GPUs as a generic resource; None where it cannot be asked."""
    try:
        shown = run_command("scontrol", "show", "config", timeout_s=_QUICK_S)
    except ToolFailure:
        return None
    types = re.search(r"^GresTypes\s*=(.*)", shown.stdout, re.MULTILINE)
    return "gpu" in types[1] if types and shown.returncode == 0 else None


class Listing:
    """All jobs of one squeue, by token.

    A job's name holds the token of the attempt that it was submitted for, whatever a site's plug-in writes around it.
    A name without one is proven by two facts together: the id that sbatch printed, and the run's directory. The id
    alone is never trusted: an answer can be cut or wrong, and the job that bears the number be another user's.
    """

    def __init__(self, rows: Mapping[str, Listed]) -> None:
        self._rows = rows
        self._named: dict[str, list[Listed]] = {}

    def of(self, job: Job) -> list[Listed]:
        """Return the rows of a run: of its token, and of its place in the array; by id if it has no token.

        A row without an index may be the array itself, whose waiting tasks were all cancelled. Its name tells.
        """
        asked = self._rows.get(job.job_id)
        if not job.token:
            return [asked] if asked is not None else []
        found = [row for row in self._with(job.token) if _is_run_of(row, job)]
        if asked is not None and asked not in found and _is_placed_as(asked, job):
            found.append(asked)
        return found

    def has(self, token: str) -> bool:
        """Return whether any job of a token is listed."""
        return bool(self._with(token))

    def _with(self, token: str) -> list[Listed]:
        if token not in self._named:
            self._named[token] = [row for row in self._rows.values() if token in row.name]
        return self._named[token]


def _is_run_of(row: Listed, job: Job) -> bool:
    """Return whether a row with a job's token is of its run."""
    _, is_task, place = row.job_id.rpartition("_")
    if is_task:
        return place == str(job.array_index)
    return f"{slug(job.key)}.{job.token}" in row.name or row.job_id in (job.job_id, _started_as(job))


def _is_placed_as(row: Listed, job: Job) -> bool:
    """Return whether a row whose name was replaced starts in the directory of a job's run, or in the root above it."""
    return not _TOKEN.search(row.name) and Path(row.directory) in (job.directory, *job.directory.parents[: _depth(job)])


def _depth(job: Job) -> int:
    return len(Path(job.key).parts)


def that_counts(job: Job, rows: Iterable[Listed]) -> tuple[str, JobStatus | None]:
    """Return the id of the one job of a run that counts, and its status if it is among the rows.

    One job has claimed the attempt, or none has started yet. An id without a row is a guess.
    """
    by_id = {row.job_id: row for row in rows}
    asked = by_id.get(job.job_id)
    if asked is not None and len(by_id) == 1 and not asked.status.is_final:
        return job.job_id, asked.status  # of what still runs, its end will tell
    holder = claimed_by(job.directory, job.token) if job.token else None
    if holder is not None:
        return holder, by_id[holder].status if holder in by_id else None
    able = [row for row in by_id.values() if not has_lost(row.status)]
    able.sort(key=lambda row: (row.status.is_final, row.job_id != job.job_id))
    return (able[0].job_id, able[0].status) if able else (job.job_id, None)


def has_lost(status: JobStatus) -> bool:
    """Return whether a job has ended because another one has the claim."""
    return status.is_final and status.exit_code == LOST_CLAIM


class SlurmClient:
    """The jobs of a Slurm cluster; SLURM_CONF of the environment says which."""

    def __init__(self, system: SlurmSystem, runs: Iterable[RunPlan] = ()) -> None:
        """Take the runs that may be submitted: `preflight` looks at their time limits."""
        self._system, self._runs = system, tuple(runs)
        self._max_array_size: int | None = None
        self._has_accounting = True
        self._ask_sacct_after = 0.0
        self._sacct_trouble = ""
        self._script_ended: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}
        self._cancelled: set[str] = set()

    def preflight(self) -> None:
        """Check that Slurm answers, has the partition, and that it allows the time limit of one run at least."""
        found = run_command("sinfo", "--all", "--noheader", "--format=%R|%l")
        if found.returncode != 0:
            raise ToolFailure(f"Slurm does not respond: {found.complaint}; check SLURM_CONF and the controller")
        known = {name: limit for name, _, limit in (line.partition("|") for line in found.stdout.splitlines()) if name}
        missing = [name for name in self._system.default_partition.split(",") if name not in known]
        if missing:
            raise BadInput(
                f"system {self._system.name!r}: default_partition: Slurm has no partition {missing[0]!r};"
                f" use one of {', '.join(sorted(known))}"
            )
        self._refuse_too_long([allowed_s(known[name]) for name in self._system.default_partition.split(",")])

    def _refuse_too_long(self, limits: Sequence[float | None]) -> None:
        """Refuse runs of which every one asks for more time than any of the partitions allows. A QOS may allow more."""
        most = max((limit or math.inf for limit in limits), default=math.inf)
        has_qos = any("qos" in words or words.startswith("-q") for words in self._system.extra_sbatch_args)
        if not self._runs or has_qos or any((run.time_limit_s or 0.0) <= most for run in self._runs):
            return
        first = self._runs[0]
        raise BadInput(
            f"test {first.test_id!r}: time_limit: {first.time_limit} is more than partition"
            f" {self._system.default_partition} allows ({format_time_limit(most)}); lower it, or use another partition"
        )

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        """Put the runs of one array together, as far as the cluster allows indices."""
        if self._max_array_size is None and any(planned.array for planned in runs):
            shown = run_command("scontrol", "show", "config")
            found = re.search(r"^MaxArraySize\s*=\s*(\d+)", shown.stdout, re.MULTILINE)
            size = int(found[1]) if found else _DEFAULT_MAX_ARRAY_SIZE
            if shown.returncode != 0:  # it is asked again
                return submit.array_batches(runs, size)
            self._max_array_size = size
        return submit.array_batches(runs, self._max_array_size or 0)

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        """Submit with sbatch."""
        self._cancelled -= {run.key for run in submission.runs}
        return submit.submit(submission, root, self._system)

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        """Look for the tokens among the names of all jobs, and in what the jobs' scripts left behind."""
        listing = self._list()
        found = {}
        for submission in submissions:
            for planned in submission.runs:
                job = Job(planned.key, "", submission.token, root / planned.key, planned.array_index)
                job_id, _ = that_counts(job, listing.of(job))
                if job_id := job_id or _started_as(job):
                    found[planned.key] = job_id
        return found

    def poll(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        """Ask squeue once for all jobs, and sacct once for those that it does not know any more."""
        if not jobs:
            return {}
        listing = self._list()
        seen, gone = _listed_and_gone(jobs, listing)
        missing, now = [key for key, job in gone.items() if self._is_missing(job, listing)], time.monotonic()
        self._missing_since = {key: self._missing_since.get(key, now) for key in missing}
        ghosts = self._ghosts(jobs, seen)
        accounted = self._account([*gone.values(), *ghosts]) if gone or ghosts else {}
        for key, job in gone.items():
            seen[key] = Seen(job.job_id, accounted.get(key) or self._by_marker(job, listing))
        for job in ghosts:
            if status := accounted.get(job.key):
                seen[job.key] = Seen(job.job_id, status, has_rivals=True)  # what is listed still, is cancelled
        return {job.key: _with_launch_failure(seen[job.key], job) for job in jobs}

    def _is_missing(self, job: Job, listing: Listing) -> bool:
        """Return whether a job may be a task that was cancelled while it waited: its array is listed, and it is not."""
        return job.was_listed and listing.has(job.token) and not _is_of(_started(job.directory), job)

    def _ghosts(self, jobs: Iterable[Job], seen: Mapping[str, Seen]) -> list[Job]:
        """Return the jobs that are listed as running although their scripts have ended: for the accounting to decide.

        A controller that was killed lists again what ran when it last saved its state.
        """
        running = [replace(job, job_id=seen[job.key].job_id) for job in jobs if _is_running(seen.get(job.key))]
        now, ended = time.monotonic(), [job for job in running if _has_ended_script(job)]
        self._script_ended = {job.key: self._script_ended.get(job.key, now) for job in ended}
        return [job for job in ended if now - self._script_ended[job.key] > GHOST_S]

    def _list(self) -> Listing:
        """Return all jobs of this user that the controller remembers: also ended ones, and in hidden partitions."""
        answer = run_command(
            *("squeue", "--all", "--noheader", "--array", "--states=all", f"--user={os.getuid()}"),
            *("--Format", SQUEUE_FORMAT),
        )
        if answer.returncode != 0:
            raise ToolFailure(f"squeue failed: {answer.complaint}")
        if answer.stdout and not answer.stdout.endswith("\n"):
            raise ToolFailure("squeue's answer was cut")
        return Listing(parse_squeue(answer.stdout))

    def _account(self, jobs: Collection[Job]) -> dict[str, JobStatus]:
        """Return the jobs whose end the accounting knows, by key.

        It is not a failure if it does not answer: there are markers.
        """
        if not self._has_accounting or time.monotonic() < self._ask_sacct_after:
            return {}
        ids = ",".join(sorted({job.job_id.partition("_")[0] for job in jobs}))
        argv = ("sacct", "--noheader", "--parsable2", "--allocations", f"--format={SACCT_FORMAT}", f"--jobs={ids}")
        self._sacct_trouble = ""
        try:
            answer = run_command(*argv, timeout_s=SACCT_TIMEOUT_S)
        except ToolFailure as error:
            self._sacct_trouble = str(error)
        else:
            self._has_accounting = "accounting storage is disabled" not in answer.stderr
            if answer.returncode == 0:
                return _ended(jobs, parse_sacct(answer.stdout))
            if self._has_accounting:
                self._sacct_trouble = f"sacct failed: {answer.complaint}"
        self._ask_sacct_after = time.monotonic() + SACCT_PAUSE_S
        return {}

    def _by_marker(self, job: Job, listing: Listing) -> JobStatus:
        """Judge a job that is not listed by what its script left behind."""
        trouble = f"; {self._sacct_trouble}" if self._sacct_trouble else ""
        if (since := self._missing_since.get(job.key)) is not None:
            is_cancelled = job.key in self._cancelled or time.monotonic() - since > VANISHED_S
            if is_cancelled:  # an answer may be incomplete for a while
                return JobStatus("CANCELLED", JobClass.CANCELLED, reason="it had not started", run_time_s=0.0)
            return JobStatus("PENDING", JobClass.ACTIVE, reason="squeue lists other tasks of its array, not this one")
        started = _started(job.directory)
        if _is_of(started, job):
            status = status_from_marker(_read(job.directory / POINT_FILES.exit_code), started.get("nodes", ""))
        elif not job.token or claimed_by(job.directory, job.token) == job.job_id:
            status = status_from_marker(None)  # it has begun, or may have, though it wrote nothing down
        else:
            reason = "Slurm does not know the job, and it has never started"
            status = JobStatus(NEVER_STARTED, JobClass.UNKNOWN, reason=reason)
        return replace(status, reason=status.reason + trouble)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Cancel what is listed under the jobs' tokens; ones that have ended are not an error."""
        wanted = list(jobs)
        self._cancelled |= {job.key for job in wanted}
        listing = self._list() if any(job.token for job in wanted) else Listing({})
        ids = [job.job_id for job in wanted if not job.token]
        ids += [row.job_id for job in wanted if job.token for row in listing.of(job) if not row.status.is_final]
        for start in range(0, len(ids), _ARGUMENTS):
            answer = run_command("scancel", *ids[start : start + _ARGUMENTS])
            if answer.returncode != 0 and "Invalid job id" not in answer.stderr:
                raise ToolFailure(f"scancel failed: {answer.complaint}")

    def unhealthy_nodes(self, nodes: str) -> dict[str, str]:
        """Ask sinfo which of the nodes are out of service."""
        return {
            name: f"{state} ({reason})" if reason not in ("none", "") else state
            for _, name, state, reason in _nodes(run_command(*_SINFO_NODES, f"--nodes={nodes}"))
            if is_out_of_service(state)
        }

    def num_usable_nodes(self, exclude: Iterable[str]) -> int | None:
        """Count the partition's nodes that are not excluded; ones out of service may come back, and Slurm waits."""
        partitions = self._system.default_partition.split(",")
        names = {name for partition, name, _, _ in _nodes(run_command(*_SINFO_NODES)) if partition in partitions}
        return len(names - set(exclude)) if names else None


def node_states(partition: str) -> dict[str, str] | None:
    """Return the states of a partition's nodes; None where Slurm does not answer."""
    try:
        answer = run_command(*_SINFO_NODES)
    except ToolFailure:
        return None
    if answer.returncode:
        return None
    return {name: state for known, name, state, _ in _nodes(answer) if known in partition.split(",")}


def _nodes(answer: Answer) -> list[tuple[str, str, str, str]]:
    """Return partition, name, state and reason of every node; one of several partitions has several rows."""
    rows = (line.split("|", 3) for line in answer.stdout.splitlines())
    return [(row[0], row[1], row[2], row[3]) for row in rows if len(row) == 4]


def _ended(jobs: Iterable[Job], rows: Iterable[Listed]) -> dict[str, JobStatus]:
    """Return the final status of each job that has a row under its own name."""
    of_id: dict[str, list[Listed]] = {}
    for row in rows:
        if row.status.is_final and not has_lost(row.status):
            of_id.setdefault(row.job_id, []).append(row)
    found = {job.key: (job, of_id.get(job.job_id, [])) for job in jobs}
    return {key: row.status for key, (job, rows) in found.items() for row in rows if _is_accounted(row, job, rows)}


def _is_accounted(row: Listed, job: Job, same_id: Sequence[Listed]) -> bool:
    """Return whether a row of the accounting is a job's: by its name, or by what its script left behind."""
    if _carries(row.name, job.token):
        return True
    is_alone = len(same_id) == 1 and not _TOKEN.search(row.name)
    return is_alone and claimed_by(job.directory, job.token) == job.job_id


def _listed_and_gone(jobs: Iterable[Job], listing: Listing) -> tuple[dict[str, Seen], dict[str, Job]]:
    """Return what is listed, and the jobs that are not, both by key."""
    seen, gone = {}, {}
    for job in jobs:
        rows = listing.of(job)
        job_id, status = that_counts(job, rows)
        if status is None:
            gone[job.key] = replace(job, job_id=job_id if job_id != job.job_id else _started_as(job) or job_id)
        else:
            rivals = (row for row in rows if row.job_id != job_id and not row.status.is_final)
            seen[job.key] = Seen(job_id, status, has_rivals=any(rivals))
    return seen, gone


def _with_launch_failure(seen: Seen, job: Job) -> Seen:
    """Return a job that failed before its script had begun as what it is: the node's failure.

    The claim proves that it had; Slurm's reason JobLaunchFailure is also that of a script that a signal has killed.
    """
    own = replace(job, job_id=seen.job_id)
    has_begun = claimed_by(job.directory, job.token) is not None or _is_of(_started(job.directory), own)
    if not job.token or seen.status.state != "FAILED" or has_begun:
        return seen
    reason = f"{seen.status.reason}; its script never began".removeprefix("; ")
    return replace(
        seen, status=replace(seen.status, state="LAUNCH_FAILED", job_class=JobClass.INFRASTRUCTURE, reason=reason)
    )


def _is_running(seen: Seen | None) -> bool:
    return seen is not None and seen.status.state == "RUNNING"


def _has_ended_script(job: Job) -> bool:
    """Return whether a job's script has written its exit code after its start."""
    started, ended = job.directory / POINT_FILES.started, job.directory / POINT_FILES.exit_code
    try:
        return ended.stat().st_mtime_ns >= started.stat().st_mtime_ns and _is_of(_started(job.directory), job)
    except FileNotFoundError:
        return False


def _is_of(started: Mapping[str, str], job: Job) -> bool:
    """Return whether what a job's script wrote down was written by this job."""
    return started.get("job") == job.job_id and _began_for(started, job.token)


def _began_for(started: Mapping[str, str], token: str) -> bool:
    return started.get("token") == token or _carries(started.get("name", ""), token)


def _carries(name: str, token: str) -> bool:
    """Return whether a job of this name was submitted with a token."""
    return token in name


def _started_as(job: Job) -> str:
    """Return the id of the job that has started under a token, "" if none has."""
    started = _started(job.directory)
    return started["job"] if job.token and _began_for(started, job.token) and "job" in started else ""


def _started(directory: Path) -> dict[str, str]:
    return parse_started(_read(directory / POINT_FILES.started) or "")


def _read(path: Path) -> str | None:
    try:
        return read_regular(path).decode(errors="replace")
    except (FileNotFoundError, NotRegular):
        return None
