"""Run Slurm's commands, read the text that they print, and classify every job state that Slurm documents."""

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.schedulers.interface import FORGOTTEN, JobClass, JobStatus, Seen

# Directory and name come last: they may contain anything, except that our directories have no two slashes in a row.
_AFTER_DIRECTORY = "//|"
SQUEUE_FORMAT = (
    f"JobArrayID:|,State:|,Reason:|,NodeList:|,exit_code:|,RestartCnt:|,TimeUsed:|,WorkDir:{_AFTER_DIRECTORY},Name:|"
)
SACCT_FORMAT = "JobID,State,ExitCode,NodeList,ElapsedRaw,JobName"
_SQUEUE_FIELDS = 7
_SACCT_FIELDS = len(SACCT_FORMAT.split(","))
TIMEOUT_S = 60.0


def parse_submitted(output: str) -> str | None:
    """Return the job id that `sbatch --parsable` prints, alone or as ID;CLUSTER, below any site's greeting."""
    for line in reversed(output.splitlines()):
        if match := re.fullmatch(r"(\d+)(;\S+)?", line.strip()):
            return match[1]
    return None


def parse_squeue(output: str) -> dict[str, Seen]:
    """Read lines of SQUEUE_FORMAT by job id (ID or ARRAY_INDEX); the components of a heterogeneous job become one.

    directory: where a job starts.
    """
    parts: dict[str, list[Seen]] = {}
    for line in output.splitlines():
        fields = line.strip().split("|", _SQUEUE_FIELDS)
        if len(fields) != _SQUEUE_FIELDS + 1 or not re.match(r"\d", fields[0]):
            continue
        job_id, state, reason, nodes, code, restarts, used, place = fields
        directory, separator, name = place.removesuffix("|").partition(_AFTER_DIRECTORY)
        if not separator:
            directory, name = "", directory
        status = JobStatus(
            state=base_state(state),
            job_class=classify(state),
            reason=_word(reason),
            nodes=_word(nodes),
            run_time_s=parse_elapsed(used),
            restarts=int(restarts) if restarts.isdigit() else 0,
            hopeless=unschedulable_as(state, reason),
        )
        if status.is_final:
            exit_code, signal = parse_exit_code(code)
            status = replace(status, exit_code=exit_code, signal=signal)
        job_id = job_id.partition("+")[0]
        parts.setdefault(job_id, []).append(Seen(job_id, status, name=name, directory=directory))
    return {
        job_id: replace(same[0], status=merge_components([each.status for each in same]))
        for job_id, same in parts.items()
    }


_BY_ROOT = "by root"  # a user's own scancel has the user's number


def parse_sacct(output: str) -> list[Seen]:
    """Read lines of SACCT_FORMAT (--parsable2 --noheader --allocations). Rows of unfinished jobs prove nothing.

    Ids come back when a cluster starts to count anew, so an id may have several rows of different names. Of a job that
    was requeued, the last row counts; the components of a heterogeneous job become one.
    """
    parts: dict[tuple[str, str], dict[str, JobStatus]] = {}
    for line in output.splitlines():
        fields = line.strip().split("|", _SACCT_FIELDS - 1)
        if len(fields) != _SACCT_FIELDS or not re.fullmatch(r"\d+(_\d+)?(\+\d+)?", fields[0]):
            continue
        job_id, state, code, nodes, elapsed, name = fields
        exit_code, signal = parse_exit_code(code)
        run_time_s = float(elapsed) if elapsed.isdigit() else None
        nodes = "" if nodes == "None assigned" else nodes
        reason = _BY_ROOT if state.strip().endswith(" by 0") else ""
        status = JobStatus(base_state(state), classify(state), exit_code, signal, reason, nodes, run_time_s)
        parts.setdefault((job_id.partition("+")[0], name), {})[job_id] = status
    return [Seen(job_id, merge_components(same.values()), name=name) for (job_id, name), same in parts.items()]


def merge_components(components: Iterable[JobStatus]) -> JobStatus:
    """Return the status of a heterogeneous job: as bad, and as unfinished, as its worst component."""
    return min(components, key=lambda status: list(_CLASSES).index(status.job_class))


def parse_exit_code(text: str) -> tuple[int | None, int | None]:
    """Read CODE:SIGNAL, or a wait status as squeue prints it; 0 means no signal.

    If a signal has ended the process, the upper byte of the status is not an exit code.
    """
    text = text.strip()
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        return int(match[1]), int(match[2]) or None
    if text.isdigit():
        signal = int(text) & 0x7F
        return (0, signal) if signal else (int(text) >> 8 & 0xFF, None)
    return None, None


def parse_elapsed(text: str) -> float | None:
    """Read [DAYS-][HOURS:]MINUTES:SECONDS as seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_started(text: str) -> dict[str, str]:
    """Read the last line that a job's script wrote when it started: name=value, separated by blanks."""
    lines = [line for line in text.splitlines() if line.strip()]
    return dict(part.partition("=")[::2] for part in lines[-1].split()) if lines else {}


def status_from_marker(exit_code: str | None, nodes: str = "") -> JobStatus:
    """Judge a job that Slurm has forgotten by the exit code that its script wrote."""
    if exit_code is None or not re.fullmatch(r"[0-9]{1,3}", exit_code.strip()):
        reason = "Slurm no longer knows the job and it left no exit code"
        return JobStatus(FORGOTTEN, JobClass.UNKNOWN, reason=reason, nodes=nodes)
    code = int(exit_code)
    job_class = JobClass.SUCCEEDED if code == 0 else JobClass.FAILED
    state, reason = "COMPLETED" if code == 0 else "FAILED", "from the job's own marker; Slurm has forgotten the job"
    return JobStatus(state, job_class, exit_code=code, reason=reason, nodes=nodes)


def array_spec(indices: Iterable[int], parallel: int | None) -> str:
    """Write indices for --array: 0-3,7%2"""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    spec = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return spec + (f"%{parallel}" if parallel else "")


def _word(text: str) -> str:
    return "" if text in ("None", "(null)") else text


def without_slurm_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Drop variables that would change sbatch's options or pretend that it runs inside another job."""
    foreign = ("SBATCH_", "SLURM_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_", "PMI")
    needed = ("SLURM_CONF", "SLURM_JWT")
    return {name: value for name, value in env.items() if name in needed or not name.startswith(foreign)}


# squeue(1) and sacct(1), JOB STATE CODES. The first of these classes that a component has is the whole job's.
_CLASSES: dict[JobClass, tuple[str, ...]] = {
    # another cluster of a federation has started the job, and is not queried
    JobClass.UNKNOWN: ("REVOKED",),
    JobClass.ACTIVE: (
        *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"),
        *("RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "POWER_UP_NODE"),
        *("EXPEDITING", "UPDATE_DB"),
    ),
    JobClass.INFRASTRUCTURE: ("NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "PREEMPTED"),
    JobClass.FAILED: ("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE"),
    JobClass.CANCELLED: ("CANCELLED",),
    JobClass.SUCCEEDED: ("COMPLETED",),
}
_CLASS_OF = {state: job_class for job_class, states in _CLASSES.items() for state in states}


def base_state(state: str) -> str:
    """Return the state without Slurm's suffixes: "CANCELLED by 1000", "COMPLETED+"."""
    match = re.match(r"[A-Z_]+", state.strip().upper())
    return match[0] if match else ""


def classify(state: str) -> JobClass:
    """Return the class of a state; an undocumented state is UNKNOWN, which is never a success."""
    return _CLASS_OF.get(base_state(state), JobClass.UNKNOWN)


# Of a job that needs more nodes than exist, or than are up now; nodes that are down may come back
PARTITION_NODE_LIMIT = "PartitionNodeLimit"
# squeue(1), JOB REASON CODES: reasons that waiting does not resolve. A site's administrator can
# change any of them, so the runner polls twice before it gives up.
_HOPELESS = {
    *("AccountNotAllowed", "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS"),
    *("PartitionConfig", PARTITION_NODE_LIMIT, "PartitionTimeLimit", "QOSNotAllowed"),
    *("ReservationDeleted", "AccountingPolicy", "InvalidBBSpec", "LicensesNotValid", "MaxMemPerLimit"),
    *("MaxBillingNodeLimit", "DeadLine"),
}
# The upper and lower limits on the request of one job: QOSMaxGRESPerJob, AssocMaxWallDurationPerJobLimit, QOSMinMemory
_JOB_LIMIT = re.compile(r"(?:Assoc|QOS)(?:Max\w+Per(?:Job|Node)(?:Limit)?|Min\w+)")
# The budget of an account or QOS, in minutes of any resource or of wall time, is used up: AssocGrpGRESMinutes,
# QOSGrpBillingMinutes, AssocGrpCPUMinutesLimit. Limits of what runs at a time (GrpGRES, GrpGRESRunMinutes) pass.
_BUDGET = re.compile(r"(?:Assoc|QOS)Grp(?:(?!Run)\w)+Minutes(?:Limit)?|(?:Assoc|QOS)GrpWallLimit")
# Also with spaces: a job whose launch a killed controller does not remember.
_LAUNCH_FAILED = re.compile(r"launch[ _]failed[ _]requeued[ _]held", re.IGNORECASE)
# The job is held, and may be released.
_HELD_STATES = ("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_HELD_REASONS = ("JobHeldAdmin", "JobHeldUser", "job_requeued_in_held_state")


def unschedulable_as(state: str, reason: str) -> JobClass | None:
    """Return the class of a job whose wait cannot end, or None; CANCELLED: it is held."""
    base = base_state(state)
    if base in _HELD_STATES or (base == "PENDING" and reason.replace(" ", "_") in _HELD_REASONS):
        return JobClass.CANCELLED
    if base != "PENDING":
        return None
    if _LAUNCH_FAILED.search(reason):
        return JobClass.INFRASTRUCTURE
    is_hopeless = reason in _HOPELESS or _JOB_LIMIT.fullmatch(reason) or _BUDGET.fullmatch(reason)
    return JobClass.FAILED if is_hopeless else None


def complaint_of(answer: CompletedProcess[str]) -> str:
    """Return the last line of stderr, with Slurm's error message; without one, the exit code and the output."""
    if lines := [line.strip() for line in answer.stderr.splitlines() if line.strip()]:
        return lines[-1]
    printed = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    return f"exit code {answer.returncode} and {f'the output {printed[-1]!r}' if printed else 'no output'}"


def run_command(
    *argv: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    keep_open: int | None = None,
    timeout_s: float = TIMEOUT_S,
    name: str = "",
) -> CompletedProcess[str]:
    """Run a command without the variables of another Slurm job. name: for messages, if it is not a command of Slurm.

    ToolFailure: it is not installed, cannot be started, or does not answer.
    """
    try:
        return subprocess.run(
            argv,
            cwd=cwd,
            env={**without_slurm_variables(os.environ), **(env or {})},
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            start_new_session=True,  # Ctrl-C is for mbridge: an sbatch must not die between request and answer
            pass_fds=() if keep_open is None else (keep_open,),
        )
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename == argv[0] and not name:
            raise ToolFailure(f"{argv[0]} is not installed here; run on a Slurm login node") from None
        raise ToolFailure(f"{name or argv[0]} cannot be started: {error}") from None
    except subprocess.TimeoutExpired:
        raise ToolFailure(f"{name or argv[0]} did not respond within {timeout_s:.0f} s") from None
