"""Node lists as Slurm writes them: `gb200-[001-003,7],login`."""

import re

from cloudai_mbridge.errors import BadInput

_MOST = 100_000  # nodes of one range


def expand_hostlist(text: str) -> list[str]:
    """Return the nodes' names, in order, each once.

    Raises:
        BadInput: a bracket is not closed, or holds something else than ranges.
    """
    names = [name for part in _parts(text) for name in _expand(part, text)]
    return list(dict.fromkeys(names))


def _parts(text: str) -> list[str]:
    """Split at commas outside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def _expand(part: str, text: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    inside, closed, tail = rest.partition("]")
    if "]" in head or bool(bracket) is not bool(closed):
        raise _bad(text)
    if not bracket:
        return [part]
    numbers = [number for each in inside.split(",") for number in _range(each.strip(), text)]
    return [head + number + end for number in numbers for end in _expand(tail, text)]


def _range(text: str, whole: str) -> list[str]:
    """Return the numbers of FIRST-LAST, with the leading zeros of FIRST."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
    if not 0 <= int(last) - int(first) < _MOST:
        raise _bad(whole)
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _bad(text: str) -> BadInput:
    return BadInput(f"nodes: {text!r} is no node list; write it as Slurm does, such as node[01-04,7]")
