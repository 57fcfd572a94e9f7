"""Submit to Slurm: one script, or an array of scripts that need the same resources."""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.launch.script import PYTHON_VARIABLE, array_key, array_script, job_name
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.schedulers.interface import Submission, SubmitLater, SubmitOutcomeUnknown, SubmitRefused
from cloudai_mbridge.schedulers.slurm.command import Answer
from cloudai_mbridge.schedulers.slurm.parsing import array_spec, parse_submitted
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


def command(submission: Submission, root: Path, system: SlurmSystem) -> tuple[list[str], Path]:
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


def job_ids(submission: Submission, answer: Answer, system: SlurmSystem) -> dict[str, str]:
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


def failure(answer: Answer, transient: Iterable[str] = (), *, before: str = "") -> Exception:
    """Return the error of an unsuccessful sbatch. transient: texts after which another try may do better.

    before: the program that called sbatch, for the message.
    """
    text = answer.stderr
    if answer.returncode <= 0 or any(words in text for words in (*_UNSURE, *transient)):
        return ToolFailure(f"{before}sbatch failed: {answer.complaint}")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    complaint = before + (" / ".join(lines[-3:]) or answer.complaint)  # the reason often stands above the last line
    answers = _ANSWER.findall(text)
    if parse_submitted(answer.stdout) is not None or not _proves_refusal(text, answers):
        return SubmitOutcomeUnknown(complaint)
    if is_limit := _is_limit(text, answers):
        return SubmitLater(before + answer.complaint, is_limit=is_limit)
    if any(words.startswith(_BUSY) for words in answers):
        return SubmitLater(before + answer.complaint)
    return SubmitRefused(complaint)


def _proves_refusal(text: str, answers: Sequence[str]) -> bool:
    """Return whether a text means that nothing was submitted. answers: the controller's."""
    if answers:
        return all(words.startswith((*_REFUSALS, *_BUSY)) for words in answers)
    return _NOT_SENT.search(text) is not None


def _is_limit(text: str, answers: Sequence[str]) -> bool:
    """Return whether jobs were refused because there are too many."""
    if not any(words.startswith((_LIMIT_ANSWER, *_BUSY)) for words in answers):
        return False
    limit = _SOME_LIMIT.search(text)
    return _LIMIT.search(text) is not None or (limit is not None and limit["unnamed"] is not None)


def array_batches(runs: Iterable[RunPlan], max_array_size: int) -> list[tuple[RunPlan, ...]]:
    """Put the runs of one array together; an index at or above `max_array_size` goes singly."""
    together: dict[str, list[RunPlan]] = {}
    for planned in runs:
        is_single = not planned.array or planned.array_index >= max_array_size
        together.setdefault(planned.key if is_single else planned.array, []).append(planned)
    return [tuple(batch) for batch in together.values()]
