"""Join the two lines that Megatron-Bridge logs per step: one rank's "Step Time", and another's "iteration N/ M |".

The first has no number, and either may be lost, or belong to an attempt that died between the two. So they are paired
by proximity: in order, as many as possible, nearest first; and never two whose step times differ.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MOST_CELLS = 2_000_000
_BAND = 8  # more lost lines of one rank than of the other, at any place of a log
_ROUNDED_S, _OTHER_CLOCK = 0.01, 0.01


@dataclass(frozen=True)
class StepLine:
    """A line of either kind. at: its place among the lines of both. step: 0 of a "Step Time" line.

    The other fields are None if the line lacks them; a "Step Time" line has the first two.
    """

    at: int
    step_time_s: float | None
    tflops_per_gpu: float | None
    step: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    is_skipped: bool = False


Pair = tuple[StepLine | None, StepLine | None]  # a "Step Time" line, and an "iteration" line


def numbered(times: Sequence[StepLine], iterations: Sequence[StepLine]) -> tuple[list[tuple[int, Pair]], int]:
    """Return the lines of each step with its number, in the log's order, and the number of unnumbered step-time lines.

    A step-time line alone has the number that is missing between its neighbours; at the end, numbers are consecutive.
    After an iteration line without a partner, it might belong to that step, and has no number.
    """
    found: list[tuple[int, Pair]] = []
    alone: list[StepLine] = []
    last, num_lost, is_known = 0, 0, True
    for time, iteration in _pairs(times, iterations):
        if iteration is None:
            alone += [time] if time else []
            continue
        if is_known and len(alone) == iteration.step - last - 1:
            found += [(number, (line, None)) for number, line in enumerate(alone, last + 1)]
        else:
            num_lost += len(alone)
        alone, last, is_known = [], iteration.step, time is not None
        found.append((last, (time, iteration)))
    if not is_known:
        return found, num_lost + len(alone)
    return found + [(number, (line, None)) for number, line in enumerate(alone, last + 1)], num_lost


def _pairs(times: Sequence[StepLine], iterations: Sequence[StepLine]) -> Iterator[Pair]:
    """Yield every line once, in order."""
    if not times or not iterations or _are_neighbours(times, iterations):
        matched = list(zip(range(len(times)), range(len(iterations)), strict=False))
    else:
        matched = _aligned(times, iterations)
    i = j = 0
    for to_i, to_j in [*matched, (len(times), len(iterations))]:
        between: list[tuple[int, Pair]] = [(line.at, (line, None)) for line in times[i:to_i]]
        between += [(line.at, (None, line)) for line in iterations[j:to_j]]
        yield from (pair for _, pair in sorted(between, key=lambda placed: placed[0]))
        if to_i < len(times) and to_j < len(iterations):
            yield times[to_i], iterations[to_j]
        i, j = to_i + 1, to_j + 1


def _are_neighbours(times: Sequence[StepLine], iterations: Sequence[StepLine]) -> bool:
    """Return whether the two lines of each step are adjacent, always in the same order; the last line may be missing.

    With both orders, a lost line would shift all lines after it.
    """
    pairs = list(zip(times, iterations, strict=False))
    is_whole = abs(len(times) - len(iterations)) <= 1
    first = iterations[0].at < times[0].at
    return is_whole and all(
        (t.at, s.at) == (2 * k + first, 2 * k + 1 - first) and _agree(t, s) for k, (t, s) in enumerate(pairs)
    )


def _agree(time: StepLine, iteration: StepLine) -> bool:
    rounded, exact = time.step_time_s, iteration.step_time_s
    if rounded is None or exact is None:
        return True
    return math.isclose(rounded, exact, rel_tol=_OTHER_CLOCK, abs_tol=_ROUNDED_S)


def _aligned(times: Sequence[StepLine], iterations: Sequence[StepLine]) -> list[tuple[int, int]]:
    """Return the pairs (indices) that leave the fewest lines unpaired, with the smallest distances.

    Time and memory grow with the lines and the difference in number; beyond 2 million cells, pairs are by position.
    """
    n, m = len(times), len(iterations)
    lowest, highest = min(0, m - n) - _BAND, max(0, m - n) + _BAND  # of j - i
    if n * (highest - lowest) > _MOST_CELLS:
        return list(zip(range(n), range(m), strict=False))
    alone = 2 * (n + m + 1) ** 2  # more than all distances together
    iteration_first = iterations[0].at < times[0].at and iterations[-1].at < times[-1].at
    ways: list[dict[int, int]] = []
    before: dict[int, int] = {}
    for i in range(n + 1):
        row: dict[int, int] = {}
        way: dict[int, int] = {}
        for j in range(max(0, i + lowest), min(m, i + highest) + 1):
            options = [(before[j] + alone, 1)] if j in before else []  # 1: times[i - 1] stays alone
            if j - 1 in row:
                options.append((row[j - 1] + alone, 2))  # 2: iterations[j - 1] stays alone
            if j - 1 in before and _agree(times[i - 1], iterations[j - 1]):
                apart = times[i - 1].at - iterations[j - 1].at
                # Of two equally close lines, the line in the log's usual order is nearer
                options.append((before[j - 1] + 2 * abs(apart) + ((apart > 0) is not iteration_first), 0))
            row[j], way[j] = min(options, default=(0, 3))
        before = row
        ways.append(way)
    pairs, i, j = list[tuple[int, int]](), n, m
    while (last := ways[i][j]) != 3:
        i, j = i - (last != 2), j - (last != 1)
        pairs += [(i, j)] if last == 0 else []
    return pairs[::-1]
