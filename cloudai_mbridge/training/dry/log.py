"""The ordered log of one rank's communication, small enough to pass from process to process. Without torch."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

_WAIT, _BATCH = -1, -2
_NUMBERS = 2  # of an entry


@dataclass(frozen=True)
class Call:
    """A collective, or a send or receive, as often as a rank makes it.

    group: name of the group. kind: of the collective, "send" or "recv". peer: global rank, of sends and receives.
    elements: of the whole tensor: a gather's result, what a reduce-scatter or all-to-all is given. is_async: waited for
    by an entry of its own. site: places in the source, the innermost first. splits: elements to each rank of an
    all-to-all, and from each; None: equal ones. batched: issued in a batch of sends and receives.
    """

    group: str
    kind: str
    dtype: str
    elements: int
    bytes: int
    peer: int | None = None
    is_async: bool = False
    site: str = ""
    batched: bool = False
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __str__(self) -> str:
        peer = {"send": f" to {self.peer}", "recv": f" from {self.peer}"}.get(self.kind, "")
        return f"{self.kind}{peer} of {self.elements} {self.dtype} in {self.group} ({self.site})"


@dataclass(frozen=True, slots=True)
class Issue:
    """Calls that a rank issues as one: one, or the sends and receives of a batch. number: its place among issues."""

    number: int
    calls: tuple[Call, ...]
    micro_batch: int | None

    @property
    def is_async(self) -> bool:
        return self.calls[0].is_async


@dataclass(frozen=True, slots=True)
class Wait:
    """The rank's work goes on when this issue is done."""

    number: int


@dataclass
class Log:
    """Issues and waits of a rank in order, and the global ranks of every group that they name."""

    rank: int
    groups: dict[str, list[int]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    entries: "array[int]" = field(default_factory=lambda: array("q"))
    _known: dict[Call, int] = field(default_factory=dict)
    _issues: int = 0

    def issue(self, calls: list[Call], micro_batch: int | None) -> int:
        """Add calls issued as one; return their number, to wait for."""
        if len(calls) != 1:
            self.entries.extend((_BATCH, len(calls)))
        for each in calls:
            index = self._known.get(each)
            if index is None:
                index = self._known[each] = len(self.calls)
                self.calls.append(each)
            self.entries.extend((index, -1 if micro_batch is None else micro_batch))
        self._issues += 1
        return self._issues - 1

    def wait(self, number: int) -> None:
        """Add the wait for an issue."""
        self.entries.extend((_WAIT, number))

    def __iter__(self) -> Iterator[Issue | Wait]:
        place, number, entries = 0, 0, self.entries
        while place < len(entries):
            code, value = entries[place], entries[place + 1]
            if code == _WAIT:
                yield Wait(value)
                place += _NUMBERS
                continue
            size = 1
            if code == _BATCH:
                size = value
                place += _NUMBERS
            own = [entries[place + _NUMBERS * i : place + _NUMBERS * i + 2] for i in range(size)]
            calls = tuple(self.calls[each[0]] for each in own)
            yield Issue(number, calls, None if not own or own[0][1] < 0 else own[0][1])
            number += 1
            place += _NUMBERS * size

    def document(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "rank": self.rank,
            "groups": self.groups,
            "calls": [list(vars(each).values()) for each in self.calls],
            "entries": list(self.entries),
        }

    @classmethod
    def of_document(cls, data: dict[str, Any]) -> "Log":
        """Return the log that `document` was made of."""
        calls = []
        for *values, splits in data["calls"]:
            both = None if splits is None else (tuple(splits[0]), tuple(splits[1]))
            calls.append(replace(Call(*values), splits=both))
        return cls(int(data["rank"]), dict(data["groups"]), calls, array("q", data["entries"]))

    def totals(self) -> list[dict[str, Any]]:
        """Return calls and bytes by group and kind, in alphabetical order."""
        found: dict[tuple[str, str], list[int]] = {}
        for entry in self:
            for each in entry.calls if isinstance(entry, Issue) else ():
                total = found.setdefault((each.group, each.kind), [0, 0])
                total[0] += 1
                total[1] += each.bytes
        return [
            {"group": group, "size": len(self.groups[group]), "kind": kind, "calls": calls, "bytes": total}
            for (group, kind), (calls, total) in sorted(found.items())
        ]
