"""Talk to Slurm through its commands."""

import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

from cloudai_mbridge.errors import BadInput, ToolFailure, counted
from cloudai_mbridge.launch.claim import claimed_by, claiming_tokens
from cloudai_mbridge.models.slurm_values import is_out_of_service
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.schedulers.interface import NEVER_BEGAN, NEVER_STARTED, Job, JobClass, JobStatus, Seen, Submission
from cloudai_mbridge.schedulers.slurm.commands import (
    PARTITION_NODE_LIMIT,
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    TIMEOUT_S,
    complaint_of,
    parse_sacct,
    parse_squeue,
    run_command,
    status_from_marker,
)
from cloudai_mbridge.schedulers.slurm.jobs import (
    Listing,
    array_batches,
    has_ended_script,
    has_lost,
    is_accounted,
    is_of,
    job_env,
    job_ids,
    read_started,
    read_text,
    sbatch_argv,
    started_as,
    that_counts,
)

SACCT_TIMEOUT_S = 20.0
READER_TIMEOUT_S = 5.0  # of each question of a reader, who shows older states if there is no answer
SACCT_PAUSE_S = 60.0
GHOST_S = 10.0  # how long a job may be listed as running after its script has ended
VANISHED_S = 20.0  # how long a waiting task may be missing from its listed array before it counts as cancelled
# sinfo takes --all, without which hidden partitions are left out, or --partition, and not both
_SINFO_NODES = ("sinfo", "--all", "--noheader", "--Node", "--format=%R|%N|%T|%E")
_ARGUMENTS = 500  # job ids in one command line
_DEFAULT_MAX_ARRAY_SIZE = 1001


class SlurmClient:
    """The jobs of the Slurm cluster that SLURM_CONF of the environment selects."""

    pace, may_be_late = (1.0, 30.0, 0.1), True  # polling is work for the controller

    def __init__(self, system: SlurmSystem) -> None:
        self._system = system
        self._max_array_size: int | None = None
        self._has_accounting = True
        self._ask_sacct_after = 0.0
        self._sacct_trouble = ""
        self._script_ended: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}
        self._cancelled: set[str] = set()

    def preflight(self) -> None:
        """Check that Slurm answers and has the partition."""
        found = run_command("sinfo", "--all", "--noheader", "--format=%R")
        if found.returncode != 0:
            raise ToolFailure(f"Slurm does not respond: {complaint_of(found)}; check SLURM_CONF and the controller")
        known = {line.strip() for line in found.stdout.splitlines()} - {""}
        missing = [name for name in self._system.default_partition.split(",") if name not in known]
        if missing:
            raise BadInput(
                f"system {self._system.name!r}: default_partition: Slurm has no partition {missing[0]!r};"
                f" use one of {', '.join(sorted(known))}"
            )

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        """Put the runs of one array together, as far as the cluster allows indices."""
        if self._max_array_size is None and any(planned.array for planned in runs):
            shown = run_command("scontrol", "show", "config")
            found = re.search(r"^MaxArraySize\s*=\s*(\d+)", shown.stdout, re.MULTILINE)
            size = int(found[1]) if found else _DEFAULT_MAX_ARRAY_SIZE
            if shown.returncode != 0:  # queried again next time
                return array_batches(runs, size)
            self._max_array_size = size
        return array_batches(runs, self._max_array_size or 0)

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        self._cancelled -= {run.key for run in submission.runs}
        argv, directory = sbatch_argv(submission, root, self._system)
        env = job_env(submission)
        answer = run_command(*argv, cwd=directory, env=env, keep_open=submission.keep_open)
        return job_ids(submission, answer, self._system)

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        """Look for the tokens among the names of all jobs, and in the files of the jobs' scripts."""
        listing = self._list()
        found = {}
        for submission in submissions:
            for planned in submission.runs:
                job = Job(planned.key, "", submission.token, root / planned.key, planned.array_index)
                job_id, _ = that_counts(job, listing.of(job))
                if job_id := job_id or started_as(job):
                    found[planned.key] = job_id
        return found

    def poll(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        """Query squeue once for all jobs, and sacct once for the jobs that it no longer lists.

        A killed controller lists again the jobs that ran when it last saved its state: of a job that is listed as
        running although its script has ended, the accounting decides.
        """
        return self._seen(jobs, self._list(), SACCT_TIMEOUT_S) if jobs else {}

    def observe(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        """Query Slurm for the jobs of the run's owner, who need not be the reader."""
        if not jobs:
            return {}
        return self._seen(jobs, self._list(_owner(jobs[0].directory), READER_TIMEOUT_S), READER_TIMEOUT_S)

    def _seen(self, jobs: Sequence[Job], listing: Listing, sacct_timeout_s: float) -> dict[str, Seen]:
        """Return every job by its rows in squeue's answer, in the accounting, and by its files."""
        now = time.monotonic()
        seen, gone = dict[str, Seen](), dict[str, Job]()
        for job in jobs:
            rows = listing.of(job)
            job_id, status = that_counts(job, rows)
            if status is None:
                gone[job.key] = replace(job, job_id=job_id if job_id != job.job_id else started_as(job) or job_id)
            else:
                rivals = (row for row in rows if row.job_id != job_id and not row.status.is_final)
                seen[job.key] = Seen(job_id, status, has_rivals=any(rivals))
        # Tasks that may have been cancelled while they waited: their arrays are listed, and they are not
        missing = [
            key
            for key, job in gone.items()
            if job.was_listed and listing.has(job.token) and not is_of(read_started(job.directory), job)
        ]
        self._missing_since = {key: self._missing_since.get(key, now) for key in missing}
        running = [
            replace(job, job_id=seen[job.key].job_id)
            for job in jobs
            if job.key in seen and seen[job.key].status.state == "RUNNING"
        ]
        ended = [job for job in running if has_ended_script(job)]
        self._script_ended = {job.key: self._script_ended.get(job.key, now) for job in ended}
        ghosts = [job for job in ended if now - self._script_ended[job.key] > GHOST_S]
        accounted = self._account([*gone.values(), *ghosts], sacct_timeout_s) if gone or ghosts else {}
        for key, job in gone.items():
            seen[key] = Seen(job.job_id, accounted.get(key) or self._by_marker(job, listing))
        for job in ghosts:
            if status := accounted.get(job.key):
                seen[job.key] = Seen(job.job_id, status, has_rivals=True)  # jobs that are still listed are cancelled
        return {job.key: _with_launch_failure(seen[job.key], job) for job in jobs}

    def _list(self, user: int | None = None, timeout_s: float = TIMEOUT_S) -> Listing:
        """Return all jobs of a user that the controller remembers, including ended jobs and hidden partitions.

        user: default: this one.
        """
        owner = os.getuid() if user is None else user
        answer = run_command(
            *("squeue", "--all", "--noheader", "--array", "--states=all", f"--user={owner}"),
            *("--Format", SQUEUE_FORMAT),
            timeout_s=timeout_s,
        )
        if answer.returncode != 0:
            raise ToolFailure(f"squeue failed: {complaint_of(answer)}")
        if answer.stdout and not answer.stdout.endswith("\n"):
            raise ToolFailure("squeue's answer was cut")
        return Listing(parse_squeue(answer.stdout))

    def _account(self, jobs: Collection[Job], timeout_s: float) -> dict[str, JobStatus]:
        """Return the final status of the jobs that have a row under their own names in the accounting, by key.

        A missing answer is not a failure: there are markers.
        """
        if not self._has_accounting or time.monotonic() < self._ask_sacct_after:
            return {}
        ids = ",".join(sorted({job.job_id.partition("_")[0] for job in jobs} - {""}))
        if not ids:  # submissions whose answer is not known
            return {}
        argv = ("sacct", "--noheader", "--parsable2", "--allocations", f"--format={SACCT_FORMAT}", f"--jobs={ids}")
        self._sacct_trouble = ""
        try:
            answer = run_command(*argv, timeout_s=timeout_s)
        except ToolFailure as error:
            self._sacct_trouble = str(error)
        else:
            self._has_accounting = "accounting storage is disabled" not in answer.stderr
            if answer.returncode == 0:
                of_id: dict[str, list[Seen]] = {}
                for row in parse_sacct(answer.stdout):
                    if row.status.is_final and not has_lost(row.status):
                        of_id.setdefault(row.job_id, []).append(row)
                found = [(job, of_id.get(job.job_id, [])) for job in jobs]
                return {job.key: row.status for job, rows in found for row in rows if is_accounted(row, job, rows)}
            if self._has_accounting:
                self._sacct_trouble = f"sacct failed: {complaint_of(answer)}"
        self._ask_sacct_after = time.monotonic() + SACCT_PAUSE_S
        return {}

    def _by_marker(self, job: Job, listing: Listing) -> JobStatus:
        """Judge an unlisted job by the files of its script."""
        trouble = f"; {self._sacct_trouble}" if self._sacct_trouble else ""
        if (since := self._missing_since.get(job.key)) is not None:
            is_cancelled = job.key in self._cancelled or time.monotonic() - since > VANISHED_S
            if is_cancelled:  # an answer may be incomplete for a while
                return JobStatus("CANCELLED", JobClass.CANCELLED, reason="it had not started", run_time_s=0.0)
            return JobStatus("PENDING", JobClass.ACTIVE, reason="squeue lists other tasks of its array, not this one")
        started = read_started(job.directory)
        if is_of(started, job):
            status = status_from_marker(read_text(job.directory / POINT_FILES.exit_code), started.get("nodes", ""))
        elif not job.token or claimed_by(job.directory, job.token) == job.job_id:
            status = status_from_marker(None)  # it has begun, or may have, although it wrote nothing
        else:
            reason = "Slurm does not know the job, and it has never started"
            status = JobStatus(NEVER_STARTED, JobClass.UNKNOWN, reason=reason)
        return replace(status, reason=status.reason + trouble)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Cancel the jobs that are listed under the jobs' tokens; ended jobs are not an error."""
        wanted = list(jobs)
        self._cancelled |= {job.key for job in wanted}
        listing = self._list() if any(job.token for job in wanted) else Listing({})
        ids = [job.job_id for job in wanted if not job.token]
        ids += [row.job_id for job in wanted if job.token for row in listing.of(job) if not row.status.is_final]
        for start in range(0, len(ids), _ARGUMENTS):
            answer = run_command("scancel", *ids[start : start + _ARGUMENTS])
            if answer.returncode != 0 and "Invalid job id" not in answer.stderr:
                raise ToolFailure(f"scancel failed: {complaint_of(answer)}")

    def throttle(self, jobs: Iterable[Job], parallel: int) -> None:
        """Set the limit of the jobs' arrays."""
        for array in sorted({job.job_id.partition("_")[0] for job in jobs if "_" in job.job_id}):
            answer = run_command("scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={parallel}")
            if answer.returncode != 0:
                raise ToolFailure(f"scontrol failed: {complaint_of(answer)}")

    def unhealthy_nodes(self, nodes: str) -> dict[str, str]:
        """Return the nodes that are out of service according to sinfo."""
        return {
            name: f"{state} ({reason})" if reason not in ("none", "") else state
            for _, name, state, reason in _nodes(run_command(*_SINFO_NODES, f"--nodes={nodes}"))
            if is_out_of_service(state)
        }

    def num_usable_nodes(self, exclude: Iterable[str]) -> int | None:
        """Count the partition's nodes that are not excluded, including nodes out of service: Slurm waits for them."""
        partitions = self._system.default_partition.split(",")
        names = {name for partition, name, _, _ in _nodes(run_command(*_SINFO_NODES)) if partition in partitions}
        return len(names - set(exclude)) if names else None

    def may_start(self, run: RunPlan, status: JobStatus) -> bool:
        """Count the nodes of a job that waits for more nodes than are up."""
        if status.reason != PARTITION_NODE_LIMIT:
            return False
        num_nodes = self.num_usable_nodes(run.exclude_nodes)
        return num_nodes is None or num_nodes >= run.num_nodes

    def exceeded(self, run: RunPlan, status: JobStatus) -> str:
        """Return the time limit or the number of nodes, whichever the reason names."""
        if re.search("Time|Wall", status.reason) and run.time_limit:
            return run.time_limit
        return counted(run.num_nodes, "node") if "Node" in status.reason else ""


def node_states(partition: str) -> dict[str, str] | None:
    """Return the states of a partition's nodes; None if Slurm does not answer."""
    try:
        answer = run_command(*_SINFO_NODES)
    except ToolFailure:
        return None
    if answer.returncode:
        return None
    return {name: state for known, name, state, _ in _nodes(answer) if known in partition.split(",")}


def _nodes(answer: CompletedProcess[str]) -> list[tuple[str, str, str, str]]:
    """Return partition, name, state and reason of every node; a node of several partitions has several rows."""
    rows = (line.split("|", 3) for line in answer.stdout.splitlines())
    return [(row[0], row[1], row[2], row[3]) for row in rows if len(row) == 4]


def _with_launch_failure(seen: Seen, job: Job) -> Seen:
    """Classify a job that failed before its script had begun as a failure of the node.

    A claim proves that it had begun; Slurm reports JobLaunchFailure also for a script that was killed by a signal.
    """
    if not job.token or seen.status.state != "FAILED":
        return seen
    own = replace(job, job_id=seen.job_id)
    has_claim = job.token in claiming_tokens(job.directory)  # listing it makes NFS look for new files
    if has_claim or is_of(read_started(job.directory), own):
        return seen
    reason = f"{seen.status.reason}; {NEVER_BEGAN}".removeprefix("; ")
    return replace(
        seen, status=replace(seen.status, state="LAUNCH_FAILED", job_class=JobClass.INFRASTRUCTURE, reason=reason)
    )


def _owner(directory: Path) -> int | None:
    """Return the user whose jobs write into a directory, None if it is gone."""
    try:
        return directory.stat().st_uid
    except OSError:
        return None
