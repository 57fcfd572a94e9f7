"""Ids of jobs. The id of a process on this machine is PID.MARK or launcher-PID.MARK; any other id is Slurm's."""

import re
from dataclasses import dataclass

# Shell word with which a script writes its own id
LOCAL_ID, LAUNCHER_ID = "$$.$_mbridge_token", "launcher-$$.$_mbridge_token"
_LAUNCHER = "launcher-"


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
