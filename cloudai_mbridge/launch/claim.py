"""The claim of an attempt: of all jobs that carry its token, only the job with the claim may train. Ids of jobs.

A claim is a symbolic link next to a run's files. Its name contains the attempt's token, its target the holder. Making
one succeeds once, also on NFS, and is never seen half done. A job's script makes it before it does anything else.
The runner makes it when it gives an attempt up: from then on no job of that attempt trains, however late it starts.

The id of a process on this machine is PID.MARK or launcher-PID.MARK; any other id is Slurm's.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.plan import POINT_FILES

# Exit code of a job whose attempt another job, or the runner, has claimed. EX_IOERR: it could not determine that.
LOST_CLAIM = 79
NO_CLAIM = 74
SIXTEEN_HEX = "[0-9a-f]{16}"  # the token of a submission
_WITHDRAWN = "withdrawn"
_JOB = "job="
# Shell word with which a script writes its own id
LOCAL_ID, LAUNCHER_ID = "$$.$_mbridge_token", "launcher-$$.$_mbridge_token"
_LAUNCHER = "launcher-"


def claim_lines(token: str, job: str) -> tuple[str, ...]:
    """Return the lines of bash that claim an attempt, or end the script.

    token, job: shell expressions. A script that is started by hand carries no token, and claims nothing.
    """
    claim = POINT_FILES.claim.format("$_mbridge_token")
    return (
        f"_mbridge_token={token}",
        f'if [[ "$_mbridge_token" =~ ^{SIXTEEN_HEX}$ ]]; then',
        f'  ln -sT "{_JOB}{job}" "{claim}" 2> /dev/null',
        f'  _mbridge_holder=$(readlink "{claim}")',
        f'  if [ "$_mbridge_holder" != "{_JOB}{job}" ]; then',
        f'    echo "{_JOB}{job} token=$_mbridge_token holder=$_mbridge_holder" >> {POINT_FILES.not_counted}',
        f'    if [ -n "$_mbridge_holder" ]; then exit {LOST_CLAIM}; fi',
        f'    echo "mbridge: cannot write $PWD/{claim}; the job ends without training" >&2',
        f"    exit {NO_CLAIM}",
        "  fi",
        "fi",
    )


def take_claim(directory: Path, token: str, job_id: str | None) -> str | None:
    """Claim an attempt for a job, or for no job at all; return the job that holds it, None if it is withdrawn.

    OSError: it can be neither made nor read.
    """
    path = directory / POINT_FILES.claim.format(token)
    with contextlib.suppress(FileExistsError):
        path.symlink_to(_WITHDRAWN if job_id is None else _JOB + job_id)
    return _holder(os.readlink(path))


def claimed_by(directory: Path, token: str) -> str | None:
    """Return the job that has claimed an attempt, None if none has."""
    try:
        return _holder(os.readlink(directory / POINT_FILES.claim.format(token)))
    except OSError:
        return None


def claiming_tokens(directory: Path) -> set[str]:
    """Return the tokens of the attempts of a run that jobs have claimed."""
    names = (path.name for path in directory.glob(POINT_FILES.claim.format("*")))
    tokens = (name.removeprefix(POINT_FILES.claim.format("")) for name in names)
    return {token for token in tokens if claimed_by(directory, token) is not None}


def _holder(target: str) -> str | None:
    return target.removeprefix(_JOB) if target.startswith(_JOB) else None


@dataclass(frozen=True)
class ProcessId:
    """A script on this machine.

    pid: 0 if invalid.
    mark: unique to the script, since process ids come back.
    is_launcher: it is Megatron-Bridge's launcher, whose job runs on a cluster.
    """

    pid: int
    mark: str
    is_launcher: bool = False

    def __str__(self) -> str:
        return f"{_LAUNCHER if self.is_launcher else ''}{self.pid}.{self.mark}"


def process_of(job_id: str) -> ProcessId | None:
    """Return the process that a job id names; None for an id of Slurm's."""
    rest = job_id.removeprefix(_LAUNCHER)
    is_launcher = rest != job_id
    pid, dot, mark = rest.partition(".")
    if not dot and not is_launcher:
        return None
    return ProcessId(int(pid) if re.fullmatch("[0-9]{1,9}", pid) else 0, mark, is_launcher)
