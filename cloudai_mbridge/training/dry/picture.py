"""The pipeline as a picture: forward and backward passes of every stage over time, from the order in which they ran.

A pass begins when its stage is free and the pass that it needs has ended on the neighbouring stage. Forward passes take
one unit of time, backward passes two; nothing is measured. Without torch.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
_UNITS = {FORWARD: 1, BACKWARD: 2}
_MOST = 20  # micro-batches with a sign of their own
_SIGNS = "0123456789abcdefghij"
_Pass = tuple[str, int, int]  # kind, chunk, micro-batch


class Bar(NamedTuple):
    """A pass in the picture: from when to when."""

    kind: str
    chunk: int
    micro_batch: int
    start: int
    end: int


def schedule(timelines: Sequence[Sequence[_Pass]], chunks: int) -> list[list[Bar]]:
    """Return the bars of every stage.

    timelines: of each stage in order, its passes in order. chunks: of a stage; chunk c of stage s is part
    c * stages + s of the model.

    ValueError: a pass needs one that no stage makes.
    """
    stages, last = len(timelines), len(timelines) * chunks - 1
    ended: dict[tuple[str, int, int], int] = {}
    bars: list[list[Bar]] = [[] for _ in timelines]
    at, free = [0] * stages, [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, timeline in enumerate(timelines):
            while at[stage] < len(timeline):
                kind, chunk, number = timeline[at[stage]]
                part = chunk * stages + stage
                ready = _ready(ended, kind, part, number, last)
                if ready is None:
                    break
                start = max(free[stage], ready)
                free[stage] = ended[kind, part, number] = start + _UNITS[kind]
                bars[stage].append(Bar(kind, chunk, number, start, free[stage]))
                at[stage] += 1
                moved = True
    if any(place < len(timeline) for place, timeline in zip(at, timelines, strict=True)):
        raise ValueError("a pass needs one that no stage makes")
    return bars


def _ready(ended: Mapping[tuple[str, int, int], int], kind: str, part: int, number: int, last: int) -> int | None:
    """Return when a pass may begin, None if what it needs has not ended."""
    if kind == FORWARD:
        return 0 if part == 0 else ended.get((FORWARD, part - 1, number))
    if part == last:
        return ended.get((FORWARD, part, number))
    return ended.get((BACKWARD, part + 1, number))


def text(bars: Sequence[Sequence[Bar]]) -> str:
    """Return a line a stage, a character a unit of time: the micro-batch, and `<` behind it if the pass is backward."""
    lines = []
    for stage, own in enumerate(bars):
        line = ["."] * max((each.end for row in bars for each in row), default=0)
        for each in own:
            sign = _SIGNS[each.micro_batch % _MOST]
            line[each.start : each.end] = [sign] if each.kind == FORWARD else [sign, "<"]
        lines.append(f"{stage:3} {''.join(line)}")
    return "\n".join(lines)


def idle(bars: Sequence[Sequence[Bar]]) -> float:
    """Return the share of time in which stages have no pass: the bubble."""
    whole = max((each.end for row in bars for each in row), default=0) * len(bars)
    busy = sum(each.end - each.start for row in bars for each in row)
    return 0.0 if not whole else 1 - busy / whole
