"""Read the text that Slurm's commands print. Pure."""

import re
from collections.abc import Mapping

from cloudai_mbridge.jobs import JobClass, JobStatus
from cloudai_mbridge.slurm.states import base_state, classify

SQUEUE_FORMAT = "%i|%T|%r|%N"


def parse_submitted(output: str) -> str | None:
    """Return the job id that `sbatch --parsable` prints, alone or as ID;CLUSTER, below any site's greeting."""
    for line in reversed(output.splitlines()):
        if match := re.fullmatch(r"(\d+)(;\S+)?", line.strip()):
            return match[1]
    return None


def parse_squeue(output: str) -> dict[str, JobStatus]:
    """Read lines of SQUEUE_FORMAT."""
    jobs = {}
    for line in output.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 4:
            job_id, state, reason, nodes = fields
            jobs[job_id] = JobStatus(base_state(state), classify(state), reason=_word(reason), nodes=nodes)
    return jobs


def parse_show_job(output: str) -> JobStatus | None:
    """Read one line of `scontrol --oneliner show job`."""
    fields: dict[str, str] = {}
    for name, value in re.findall(r"(?:^|\s)(JobState|Reason|ExitCode|NodeList)=(\S+)", output):
        fields.setdefault(name, value)  # a comment further on may hold the same words
    if "JobState" not in fields:
        return None
    state = fields["JobState"]
    exit_code, signal = parse_exit_code(fields.get("ExitCode", ""))
    return JobStatus(
        state=base_state(state),
        job_class=classify(state),
        exit_code=exit_code,
        signal=signal,
        reason=_word(fields.get("Reason", "")),
        nodes=_word(fields.get("NodeList", "")),
    )


def parse_exit_code(text: str) -> tuple[int | None, int | None]:
    """Read CODE:SIGNAL; a signal of 0 is none."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    return (int(match[1]), int(match[2]) or None) if match else (None, None)


def status_from_marker(text: str | None) -> JobStatus:
    """Judge a job that Slurm has forgotten by the exit code that its script left behind."""
    if text is None or not re.fullmatch(r"[0-9]{1,3}", text.strip()):
        reason = "Slurm no longer knows the job and it left no exit code"
        return JobStatus("FORGOTTEN", JobClass.UNKNOWN, reason=reason)
    code = int(text)
    job_class = JobClass.SUCCEEDED if code == 0 else JobClass.FAILED
    state = "COMPLETED" if code == 0 else "FAILED"
    return JobStatus(state, job_class, exit_code=code, reason="from the job's own marker; Slurm has forgotten the job")


def _word(text: str) -> str:
    return "" if text in ("None", "(null)") else text


def without_slurm_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Drop what would change sbatch's options or pretend that it runs inside another job."""
    foreign = ("SBATCH_", "SLURM_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_", "PMI")
    needed = ("SLURM_CONF", "SLURM_JWT")
    return {name: value for name, value in env.items() if name in needed or not name.startswith(foreign)}
