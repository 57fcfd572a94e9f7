"""Run one of Slurm's commands."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.schedulers.slurm.parsing import without_slurm_variables

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """Output of a command."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def complaint(self) -> str:
        """The last line of stderr, with Slurm's error message; without one, the exit code and the output."""
        if lines := [line.strip() for line in self.stderr.splitlines() if line.strip()]:
            return lines[-1]
        printed = [line.strip() for line in self.stdout.splitlines() if line.strip()]
        return f"exit code {self.returncode} and {f'the output {printed[-1]!r}' if printed else 'no output'}"


def run_command(
    *argv: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    keep_open: int | None = None,
    timeout_s: float = TIMEOUT_S,
    name: str = "",
) -> Answer:
    """Run a command without the variables of another Slurm job. name: for messages, if it is not a command of Slurm.

    ToolFailure: it is not installed, cannot be started, or does not answer.
    """
    try:
        done = subprocess.run(
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
    return Answer(done.returncode, done.stdout, done.stderr)
