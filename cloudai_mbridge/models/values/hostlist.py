"""Nodes of a scenario: `gb200-[001-003,7],login` as in Slurm, or a number of nodes of a group of the system file."""

import re
from collections.abc import Iterator
from itertools import product

from cloudai_mbridge.errors import BadInput

_MOST = 100_000  # nodes of a list
_MOST_EXPANDED = 10 * _MOST  # including duplicates
_LONGEST_SHOWN = 200
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
    split = re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", text)  # at commas outside brackets
    parts = [_pieces(part.strip(), text) for part in split if part.strip()]
    if sum(map(_num_names, parts)) <= _MOST_EXPANDED:
        names = list(dict.fromkeys(name for pieces in parts for name in _names(pieces)))
        if len(names) <= _MOST:
            return names
    raise BadInput(f"{_cut(text)!r} names more than {_MOST} nodes; name fewer")


_NumberRange = tuple[range, int]  # FIRST-LAST, and the width of FIRST with its leading zeros
_Piece = str | list[_NumberRange]  # text outside the brackets, or the ranges in them


def _pieces(part: str, text: str) -> list[_Piece]:
    found = re.split(r"\[([^\[\]]*)\]", part)
    if any("[" in piece or "]" in piece for piece in found):
        raise _bad(text)
    return [[_numbers(each.strip(), text) for each in p.split(",")] if i % 2 else p for i, p in enumerate(found)]


def _numbers(text: str, whole: str) -> _NumberRange:
    match = re.fullmatch("([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
    first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
    if not 0 <= int(last) - int(first) < _MOST:
        raise _bad(whole)
    return range(int(first), int(last) + 1), len(first)


def _num_names(pieces: list[_Piece]) -> int:
    """Return how many names a part expands to, or a number above the limit."""
    number = 1
    for piece in pieces:
        choices = 1 if isinstance(piece, str) else sum(len(numbers) for numbers, _ in piece)
        number = min(number * choices, _MOST_EXPANDED + 1)
    return number


def _names(pieces: list[_Piece]) -> Iterator[str]:
    choices = (
        [piece] if isinstance(piece, str) else [str(n).zfill(width) for numbers, width in piece for n in numbers]
        for piece in pieces
    )
    return map("".join, product(*choices))


def _bad(text: str) -> BadInput:
    return BadInput(f"{_cut(text)!r} is not a node list; write it as Slurm does, such as node[01-04,7]")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


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
