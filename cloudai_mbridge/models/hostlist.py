"""Nodes as a scenario names them: `gb200-[001-003,7],login` as Slurm does, or so many of a group of the system file."""

import re
from collections.abc import Iterator
from itertools import islice

from cloudai_mbridge.errors import BadInput

_MOST = 100_000  # nodes of a list
_MOST_EXPANDED = 10 * _MOST  # with those that are named more than once
_LONGEST_SHOWN = 200
MAX_AVAILABLE = "max_avail"  # as many as are free now


def check_nodes(text: str) -> str:
    """Return a node list or PARTITION:GROUP:COUNT as it is.

    Raises:
        ValueError: it is neither.
    """
    try:
        if ":" in text:
            parse_group(text)
        else:
            expand_hostlist(text)
    except BadInput as error:
        raise ValueError(str(error)) from None
    return text


def parse_group(text: str) -> tuple[str, str, int | None]:
    """Return the partition, the group and the number of nodes of PARTITION:GROUP:COUNT; None is as many as are free.

    Raises:
        BadInput: the text has another form.
    """
    partition, _, rest = text.partition(":")
    group, _, count = rest.partition(":")
    if not (partition and group and (count == MAX_AVAILABLE or re.fullmatch("0*[1-9][0-9]*", count))):
        raise BadInput(f"{text!r} is not PARTITION:GROUP:COUNT, where COUNT is at least 1, or {MAX_AVAILABLE!r}")
    return partition, group, None if count == MAX_AVAILABLE else int(count)


def expand_hostlist(text: str) -> list[str]:
    """Return the nodes' names, in order, each once.

    Raises:
        BadInput: a bracket is not closed, holds something else than ranges, or there are more than 100,000 nodes.
    """
    every = (name for part in _parts(text) for name in _expand(part, text))
    names = list(dict.fromkeys(islice(every, _MOST_EXPANDED)))
    if len(names) > _MOST or next(every, None) is not None:
        raise BadInput(f"{_cut(text)!r} names more than {_MOST} nodes; name fewer")
    return names


def _parts(text: str) -> list[str]:
    """Split at commas outside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def _expand(part: str, text: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    inside, closed, tail = rest.partition("]")
    if "]" in head or bool(bracket) is not bool(closed):
        raise _bad(text)
    if not bracket:
        yield part
        return
    numbers = (number for each in inside.split(",") for number in _range(each.strip(), text))
    yield from (head + number + end for number in numbers for end in _expand(tail, text))


def _range(text: str, whole: str) -> Iterator[str]:
    """Return the numbers of FIRST-LAST, with the leading zeros of FIRST."""
    match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text)
    first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
    if not 0 <= int(last) - int(first) < _MOST:
        raise _bad(whole)
    return (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _bad(text: str) -> BadInput:
    return BadInput(f"{_cut(text)!r} is not a node list; write it as Slurm does, such as node[01-04,7]")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
