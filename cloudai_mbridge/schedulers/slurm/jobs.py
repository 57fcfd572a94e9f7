"""Jobs of a run on a cluster: submitted under the token of an attempt, and found by it."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.files.regular import NotRegular, read_regular
from cloudai_mbridge.launch.claim import LOST_CLAIM, SIXTEEN_HEX, claimed_by, process_of
from cloudai_mbridge.launch.script import PYTHON_VARIABLE, array_key, array_script, job_name, slug
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.schedulers.interface import (
    RUNNING,
    Job,
    JobClass,
    JobStatus,
    Seen,
    Submission,
    SubmitLater,
    SubmitOutcomeUnknown,
    SubmitRefused,
)
from cloudai_mbridge.schedulers.slurm.commands import (
    array_spec,
    complaint_of,
    parse_started,
    parse_submitted,
    status_from_marker,
)
from cloudai_mbridge.training.process.log_lines import JOB_TOKEN_VARIABLE

# After these the controller may or may not have the job, and another try may do better.
_UNSURE = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Communication connection failure",
    "Connection refused",
    "Connection reset",
    "Connection timed out",
    "Transport endpoint is not connected",
    "Zero Bytes were transmitted or received",
    "Unexpected message received",
    "Slurm backup controller in standby mode",
    "Protocol authentication error",
    "Invalid authentication credential",
    "Munge encode failed",
)
_BUSY = ("Slurm temporarily unable to accept job", "Resource temporarily unavailable")
# A limit on the number of jobs passes when jobs end; a limit on the size of a job does not. Slurm names it above the
# answer, which is the same for both.
_LIMIT_ANSWER = "Job violates accounting/QOS policy"
_LIMIT = re.compile(r"SubmitJob|MaxJobCount")
_SOME_LIMIT = re.compile(r"(?<!\w)(?:Assoc|QOS)\w+|(?P<unnamed>job submit limit, user's)")
# The controller's answers when it has examined and rejected a job (slurm_errno.h), and sbatch's messages about
# options and files before it sends anything. No other text proves that nothing was submitted.
_ANSWER = re.compile(r"submission failed: (.*)")
_REFUSALS = (
    *(f"Invalid {what}" for what in ("--nice", "GRES", "Trackable RESource", "account", "feature", "generic resource")),
    *(f"Invalid {what}" for what in ("group id", "job array", "job id", "license", "mcs_label", "node name")),
    *(f"Invalid {what}" for what in ("partition name", "preferred feature", "qos", "time-min", "user id", "wckey")),
    "Access denied to requested reservation",
    "Access/permission denied",
    "CPU count specification invalid",
    "Duplicate generic resource",
    "Job dependency problem",
    "Job script not specified",
    "Job size specification needs to be provided",
    _LIMIT_ANSWER,
    "Memory required by task is not available",
    "Memory specification can not be satisfied",
    "More processors requested than permitted",
    "No partition specified",
    "Node count specification invalid",
    "Only batch jobs are accepted",
    "Pathname of a file",
    *(f"Requested {what}" for what in ("GRES", "account", "more tasks", "node configuration", "nodes not in")),
    *(f"Requested {what}" for what in ("partition configuration", "reservation", "time limit")),
    "Required node not available",
    "Required partition not available",
    "Task count specification invalid",
    "Task distribution specification invalid",
    "User's group not permitted",
)
_NOT_SENT = re.compile(
    r"error: Invalid \S+ specification|Unable to open file|Invalid directive found|unrecognized option|invalid option"
)
_TOKEN = re.compile(rf"\.{SIXTEEN_HEX}")  # a site's own name may be a hash


def sbatch_argv(submission: Submission, root: Path, system: SlurmSystem) -> tuple[list[str], Path]:
    """Return the arguments of sbatch, and the directory to call it in."""
    first, more, excluded = submission.runs[0], [], submission.exclude_nodes
    directory, script = root / first.key, POINT_FILES.slurm_script
    if len(submission.runs) > 1:
        directory, script = root, array_script(first.array)
        more.append(f"--array={array_spec((run.array_index for run in submission.runs), submission.parallel)}")
    if excluded:
        more.append(f"--exclude={','.join(sorted({*first.exclude_nodes, *excluded}))}")
    name = job_name_of(submission, root, system)
    argv = ["sbatch", "--parsable", "--no-requeue", f"--job-name={name}", f"--chdir={directory}", *more, script]
    return argv, directory


def job_ids(submission: Submission, answer: CompletedProcess[str], system: SlurmSystem) -> dict[str, str]:
    """Return the job ids of the runs, by key. Raises as `Scheduler.submit`."""
    job_id = parse_submitted(answer.stdout)
    if answer.returncode != 0 or job_id is None:
        raise failure(answer, system.extra_transient_status_errors)
    if len(submission.runs) == 1:
        return {submission.runs[0].key: job_id}
    return {run.key: f"{job_id}_{run.array_index}" for run in submission.runs}


def job_name_of(submission: Submission, root: Path, system: SlurmSystem) -> str:
    """Return the job name: the run's, the point's, and at its end the submission's token."""
    first = submission.runs[0]
    key = first.key if len(submission.runs) == 1 else array_key(first.array, first)
    return f"{job_name(system, key, root.name)}.{submission.token}"


def job_env(submission: Submission) -> dict[str, str]:
    """Return the variables that are passed in the environment only: credentials, the interpreter, and the token."""
    return {PYTHON_VARIABLE: sys.executable, JOB_TOKEN_VARIABLE: submission.token, **submission.runs[0].secret_env}


def failure(answer: CompletedProcess[str], transient: Iterable[str] = (), *, before: str = "") -> Exception:
    """Return the error of an unsuccessful sbatch. transient: texts after which another try may do better.

    before: the program that called sbatch, for the message.
    """
    text = answer.stderr
    if answer.returncode <= 0 or any(words in text for words in (*_UNSURE, *transient)):
        return ToolFailure(f"{before}sbatch failed: {complaint_of(answer)}")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    complaint = before + (" / ".join(lines[-3:]) or complaint_of(answer))  # the reason often stands above the last line
    answers = _ANSWER.findall(text)
    if parse_submitted(answer.stdout) is not None or not _proves_refusal(text, answers):
        return SubmitOutcomeUnknown(complaint)
    if any(words.startswith((_LIMIT_ANSWER, *_BUSY)) for words in answers):
        limit = _SOME_LIMIT.search(text)
        if _LIMIT.search(text) is not None or (limit is not None and limit["unnamed"] is not None):
            return SubmitLater(before + complaint_of(answer), is_limit=True)  # there are too many jobs
    if any(words.startswith(_BUSY) for words in answers):
        return SubmitLater(before + complaint_of(answer))
    return SubmitRefused(complaint)


def _proves_refusal(text: str, answers: Sequence[str]) -> bool:
    """Return whether a text means that nothing was submitted. answers: the controller's."""
    if answers:
        return all(words.startswith((*_REFUSALS, *_BUSY)) for words in answers)
    return _NOT_SENT.search(text) is not None


def array_batches(runs: Iterable[RunPlan], max_array_size: int) -> list[tuple[RunPlan, ...]]:
    """Put the runs of one array together; an index at or above `max_array_size` goes singly."""
    together: dict[str, list[RunPlan]] = {}
    for planned in runs:
        is_single = not planned.array or planned.array_index >= max_array_size
        together.setdefault(planned.key if is_single else planned.array, []).append(planned)
    return [tuple(batch) for batch in together.values()]


class Listing:
    """All jobs of one squeue, by token.

    A job's name holds the token of the attempt that it was submitted for, whatever a site's plug-in writes around it.
    A name without one is proven by two facts together: the id that sbatch printed, and the run's directory. The id
    alone is never trusted: an answer can be cut or wrong, and the job that bears the number be another user's.
    """

    def __init__(self, rows: Mapping[str, Seen]) -> None:
        self._rows = rows
        self._named: dict[str, list[Seen]] = {}

    def of(self, job: Job) -> list[Seen]:
        """Return the rows of a run: by its token and its place in the array; by id if it has no token.

        A row without an index may be the array itself, whose waiting tasks were all cancelled. Its name decides.
        A row whose name was replaced is the run's if it starts in the run's directory, or in the root above it.
        """
        asked = self._rows.get(job.job_id)
        if not job.token:
            return [asked] if asked is not None else []
        found = []
        for row in self._with(job.token):
            _, is_task, place = row.job_id.rpartition("_")
            if is_task:
                is_own = place == str(job.array_index)
            else:
                is_named = f"{slug(job.key)}.{job.token}" in row.name
                is_own = is_named or row.job_id in (job.job_id, started_as(job))
            found += [row] if is_own else []
        if asked is not None and asked not in found and not _TOKEN.search(asked.name):
            places = (job.directory, *job.directory.parents[: len(Path(job.key).parts)])
            found += [asked] if Path(asked.directory) in places else []
        return found

    def has(self, token: str) -> bool:
        """Return whether any job of a token is listed."""
        return bool(self._with(token))

    def _with(self, token: str) -> list[Seen]:
        if token not in self._named:
            self._named[token] = [row for row in self._rows.values() if token in row.name]
        return self._named[token]


def that_counts(job: Job, rows: Iterable[Seen]) -> tuple[str, JobStatus | None]:
    """Return the id of the one job of a run that counts, and its status if it is among the rows.

    One job has claimed the attempt, or none has started yet. An id without a row is a guess.
    """
    by_id = {row.job_id: row for row in rows}
    asked = by_id.get(job.job_id)
    if asked is not None and len(by_id) == 1 and not asked.status.is_final:
        return job.job_id, asked.status  # still running: a later poll decides
    holder = claimed_by(job.directory, job.token) if job.token else None
    if holder is not None:
        return holder, by_id[holder].status if holder in by_id else None
    able = [row for row in by_id.values() if not has_lost(row.status)]
    able.sort(key=lambda row: (row.status.is_final, row.job_id != job.job_id))
    return (able[0].job_id, able[0].status) if able else (job.job_id, None)


def has_lost(status: JobStatus) -> bool:
    """Return whether a job has ended because another one has the claim."""
    return status.is_final and status.exit_code == LOST_CLAIM


def is_accounted(row: Seen, job: Job, same_id: Sequence[Seen]) -> bool:
    """Return whether a row of the accounting is a job's: by its name, or by the files of its script."""
    if job.token in row.name:
        return True
    is_alone = len(same_id) == 1 and not _TOKEN.search(row.name)
    return is_alone and claimed_by(job.directory, job.token) == job.job_id


def is_of(started: Mapping[str, str], job: Job) -> bool:
    """Return whether the start file of a job's script was written by this job."""
    return started.get("job") == job.job_id and _began_for(started, job.token)


def _began_for(started: Mapping[str, str], token: str) -> bool:
    return started.get("token") == token or token in started.get("name", "")


def started_as(job: Job) -> str:
    """Return the id of the job that has started under a token, "" if none has."""
    started = read_started(job.directory)
    return started["job"] if job.token and _began_for(started, job.token) and "job" in started else ""


def has_ended_script(job: Job) -> bool:
    """Return whether a job's script has written its exit code after its start."""
    started, ended = job.directory / POINT_FILES.started, job.directory / POINT_FILES.exit_code
    try:
        return ended.stat().st_mtime_ns >= started.stat().st_mtime_ns and is_of(read_started(job.directory), job)
    except FileNotFoundError:
        return False


def status_in_files(job: Job) -> JobStatus | None:
    """Return the status of a job as its script's own files prove it, None if they prove nothing.

    A launcher's exit code is not its job's.
    """
    if (process := process_of(job.job_id)) is not None and process.is_launcher:
        return None
    own = replace(job, job_id=job.job_id or started_as(job))
    started = read_started(job.directory)
    if not own.job_id or not is_of(started, own):
        return None
    if has_ended_script(own):
        status = status_from_marker(read_text(job.directory / POINT_FILES.exit_code), started.get("nodes", ""))
        if status.is_final:
            return replace(status, reason="by its own exit code")
    return JobStatus(RUNNING, JobClass.ACTIVE, reason="by its own start mark", nodes=started.get("nodes", ""))


def read_started(directory: Path) -> dict[str, str]:
    """Return the content of the file that a job's script writes when it starts; {} if it has not started."""
    return parse_started(read_text(directory / POINT_FILES.started) or "")


def read_text(path: Path) -> str | None:
    """Return a file's text, None if it is missing or not a regular file."""
    try:
        return read_regular(path).decode(errors="replace")
    except (FileNotFoundError, NotRegular):
        return None
