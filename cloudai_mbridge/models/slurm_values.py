"""Values as Slurm reads them: node lists, time limits, options of sbatch and srun."""

import re
import shlex
from collections.abc import Mapping
from itertools import product
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from cloudai_mbridge.errors import BadInput

_MOST = 100_000  # nodes of a list
_MOST_EXPANDED = 10 * _MOST  # including duplicates
MAX_AVAILABLE = "max_avail"  # all nodes that are free now


def check_nodes(text: str) -> str:
    """Return a node list or PARTITION:GROUP:COUNT unchanged; ValueError if it is neither."""
    try:
        if ":" in text:
            parse_group(text)
        else:
            expand_hostlist(text)
    except BadInput as error:
        raise ValueError(str(error)) from None
    return text


def parse_group(text: str) -> tuple[str, str, int | None]:
    """Return partition, group and number of nodes (None: all free nodes); BadInput for text of another form."""
    partition, _, rest = text.partition(":")
    group, _, count = rest.partition(":")
    if not (partition and group and (count == MAX_AVAILABLE or re.fullmatch("0*[1-9][0-9]*", count))):
        raise BadInput(f"{text!r} is not PARTITION:GROUP:COUNT, where COUNT is at least 1, or {MAX_AVAILABLE!r}")
    return partition, group, None if count == MAX_AVAILABLE else int(count)


def expand_hostlist(text: str) -> list[str]:
    """Return the nodes' names, in order, without duplicates; BadInput for invalid brackets or over 100,000 nodes."""
    names: dict[str, None] = {}
    num_expanded = 0
    for part in re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", text):  # at commas outside brackets
        choices: list[list[str]] = []
        num_names = 1
        for i, piece in enumerate(re.split(r"\[([^\[\]]*)\]", part.strip())):
            if "[" in piece or "]" in piece:
                raise _bad(text)
            choices.append(_numbers(piece, text) if i % 2 else [piece])
            num_names *= len(choices[-1])
            if num_expanded + num_names > _MOST_EXPANDED:
                raise _too_many(text)
        num_expanded += num_names
        names |= dict.fromkeys(map("".join, product(*choices)))
    names.pop("", None)
    if len(names) > _MOST:
        raise _too_many(text)
    return list(names)


def _numbers(ranges: str, text: str) -> list[str]:
    """Return the numbers of FIRST-LAST,NUMBER with the leading zeros of FIRST."""
    found: list[str] = []
    for each in ranges.split(","):
        match = re.fullmatch("([0-9]{1,18})(?:-([0-9]{1,18}))?", each.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < _MOST:
            raise _bad(text)
        found += (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        if len(found) > _MOST_EXPANDED:
            raise _too_many(text)
    return found


def _bad(text: str) -> BadInput:
    return BadInput(f"{_cut(text)!r} is not a node list; write it as Slurm does, such as node[01-04,7]")


def _too_many(text: str) -> BadInput:
    return BadInput(f"{_cut(text)!r} names more than {_MOST} nodes; name fewer")


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


_OUT_OF_SERVICE = (
    *("blocked", "boot", "down", "drain", "drng", "error", "fail", "futr", "future", "inval", "maint"),
    *("npc", "perfctrs", "pow", "reboot", "unk"),
)
_FREE = ("idle", "comp", "resv", "reserved")


def is_out_of_service(state: str) -> bool:
    """Return whether a node in this state runs nothing until an administrator acts; `*`: it does not respond."""
    return state.endswith("*") or state.startswith(_OUT_OF_SERVICE)


def is_free(state: str) -> bool:
    """Return whether CloudAI counts a node in this state as free for `max_avail`."""
    return not is_out_of_service(state) and state.startswith(_FREE)


_FORM = re.compile(r"([0-9]+-[0-9]+(:[0-9]+){0,2}|[0-9]+(:[0-9]+){0,2})")
_SHORT = re.compile(r"([0-9]+)([smhdw])", re.IGNORECASE)
_LONGEST_MIN = 2**32 - 3  # Slurm counts minutes in 32 bits, and the two largest numbers mean something else
_HUGE = re.compile(r"[1-9][0-9]{15}")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_time_limit(text: str | None) -> float | None:
    """Return the seconds of minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; None for no limit.

    Zero means no limit, as in sbatch(1).
    ValueError: the text has another form.
    """
    if text is None:
        return None
    if not _FORM.fullmatch(text):
        raise ValueError("is not a Slurm time limit; write minutes, HH:MM:SS or D-HH:MM:SS")
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60.0 + seconds or None


def slurm_time(text: str) -> str | None:
    """Return a TOML's time limit in a format with the same meaning in Slurm; None for an empty text.

    As in CloudAI, 90s, 10m, 1h, 2d and 1w are durations and HH:MM is hours and minutes; Slurm reads it as MM:SS.
    ValueError: neither CloudAI nor Slurm reads the text, or it is longer than Slurm can count.
    """
    text = text.strip()
    limit: str | None = text
    if _HUGE.search(text):
        limit = None
    elif short := _SHORT.fullmatch(text):
        limit = format_time_limit(int(short[1]) * _SECONDS[short[2].lower()])
    elif re.fullmatch(r"[0-9]+:[0-9]+", text):
        hours, minutes = map(int, text.split(":"))
        limit = format_time_limit((hours * 60 + minutes) * 60)
    elif text and not _FORM.fullmatch(text):
        raise ValueError(
            "is not a time limit; write HH:MM:SS, D-HH:MM:SS, minutes, or a duration such as 90s, 10m, 2h, 1d"
        )
    if limit is None or (limit and (parse_time_limit(limit) or 0) > 60 * _LONGEST_MIN):
        raise ValueError(f"is longer than Slurm can count ({_LONGEST_MIN} minutes); shorten it, or write 0 for none")
    return limit or None


def format_time_limit(seconds: float | None) -> str | None:
    """Format a limit as HH:MM:SS, or D-HH:MM:SS from a day on."""
    if seconds is None:
        return None
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{rest:02}"


SlurmTime = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),  # minutes, as in Slurm
    AfterValidator(slurm_time),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}),
]


_UNWATCHED = "the job would run on a cluster that mbridge does not query; set SLURM_CONF instead"
_NOT_SUBMITTED = "no job would be submitted"
_NOT_TRAINED = "nothing would be trained"
_OUTPUT = "mbridge reads a run's output in the run's own directory"
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
_SHORTEST = 5  # of a prefix, with its dashes


def usable_with_sbatch(options: list[str]) -> list[str]:
    """Reject an option of sbatch that breaks job tracking."""
    for option in options:
        _check(option, _SBATCH, _SBATCH_SHORT)
    return options


def usable_with_srun(words: str) -> str:
    """Reject an option of srun that breaks run tracking."""
    for word in shlex.split(words):
        _check(word, _SRUN, _SRUN_SHORT)
    return words


def _check(option: str, refused: Mapping[str, str], short: Mapping[str, str]) -> None:
    name, equals, value = option.strip().partition("=")
    full = short.get(name[1:2]) if name.startswith("-") else None
    if name.startswith("--"):
        is_prefix = len(name) >= _SHORTEST and name != "--wait-all-nodes"
        full = next((full for full in refused if is_prefix and full.startswith(name[2:])), None)
    if full is not None:
        raise ValueError(f"--{full} cannot be used: {refused[full]}")
    if name == "--export" and equals and "ALL" not in value.split(","):
        raise ValueError(
            "--export without ALL cannot be used: the job would lack variables that mbridge passes;"
            " write --export=ALL,NAME=value"
        )
