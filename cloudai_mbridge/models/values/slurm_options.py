"""Options of sbatch and srun that would break job tracking, or move a job's output out of its directory.

Both commands accept unambiguous prefixes of long options.
"""

import shlex
from collections.abc import Mapping, Sequence

_UNWATCHED = "the job would run on a cluster that mbridge does not query; set SLURM_CONF instead"
_NOT_SUBMITTED = "no job would be submitted"
_NOT_TRAINED = "nothing would be trained"
_OUTPUT = "mbridge reads a run's output in the run's own directory"
_EXPORT = "the job would lack variables that mbridge passes; write --export=ALL,NAME=value"
_SBATCH = {
    "array": "mbridge makes the arrays; use iterations, or axes of a sweep",
    "clusters": _UNWATCHED,
    "error": _OUTPUT,
    "help": _NOT_SUBMITTED,
    "output": _OUTPUT,
    "test-only": _NOT_SUBMITTED,
    "usage": _NOT_SUBMITTED,
    "version": _NOT_SUBMITTED,
    "wait": "sbatch would return only after the job has ended",
    "wrap": "the job runs the script that mbridge writes",
}
_SBATCH_SHORT = {"M": "clusters", "V": "version", "W": "wait", "a": "array", "e": "error", "h": "help", "o": "output"}
_SRUN = {
    "clusters": _UNWATCHED,
    "error": _OUTPUT,
    "help": _NOT_TRAINED,
    "jobid": "the step would run in another job",
    "output": _OUTPUT,
    "test-only": _NOT_TRAINED,
    "usage": _NOT_TRAINED,
    "version": _NOT_TRAINED,
}
_SRUN_SHORT = {"M": "clusters", "V": "version", "e": "error", "h": "help", "o": "output"}
# Options that begin with the name of a refused option
_OTHERS = frozenset({"wait-all-nodes"})
_SHORTEST = 3


def usable_with_sbatch(options: list[str]) -> list[str]:
    """Reject an option of sbatch that breaks job tracking."""
    for option in options:
        _check(option, _SBATCH, _SBATCH_SHORT)
    return options


def usable_with_srun(words: str) -> str:
    """Reject an option of srun that breaks run tracking."""
    split: Sequence[str] = shlex.split(words)
    for word in split:
        _check(word, _SRUN, _SRUN_SHORT)
    return words


def _check(option: str, refused: Mapping[str, str], short: Mapping[str, str]) -> None:
    name, equals, value = option.strip().partition("=")
    if name.startswith("--"):
        full = _full_name(name[2:], refused)
    else:
        full = short.get(name[1:2]) if name.startswith("-") else None
    if full is not None:
        raise ValueError(f"--{full} cannot be used: {refused[full]}")
    if name == "--export" and equals and "ALL" not in value.split(","):
        raise ValueError(f"--export without ALL cannot be used: {_EXPORT}")


def _full_name(name: str, refused: Mapping[str, str]) -> str | None:
    if len(name) < _SHORTEST or name in _OTHERS:
        return None
    return next((full for full in refused if full.startswith(name)), None)
