"""Whether the shards of a checkpoint cover every tensor exactly once, so that any layout can read it. Pure Python."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

_MOST_PROBLEMS = 20


def problems_of(shards: Iterable[tuple[Any, ...]]) -> list[str]:
    """Return a line for every tensor that is not covered exactly once, at most twenty.

    shards: as `states.shards` gives them, of all ranks that save one.
    """
    by_key: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for shard in shards:
        if shard[5]:
            by_key[shard[0]].append(shard)
    found = (f"{key}: {why}" for key, own in sorted(by_key.items()) if (why := _problem(own)))
    return [line for line, _ in zip(found, range(_MOST_PROBLEMS), strict=False)]


def _problem(shards: list[tuple[Any, ...]]) -> str:
    shapes = {tuple(shape) for _, shape, *_ in shards}
    if len(shapes) > 1:
        return f"ranks disagree about its shape: {' and '.join(map(str, sorted(shapes)))}"
    shape = shapes.pop()
    boxes = [(tuple(offset), _extent(shape, tuple(local))) for _, _, offset, local, *_ in shards]
    for offset, extent in boxes:
        if any(start + size > whole for start, size, whole in zip(offset, extent, shape, strict=True)):
            return f"a shard of {extent} at {offset} lies outside {shape}"
    if doubled := _overlap(boxes):
        return f"shards overlap: {doubled[0]} at {doubled[1]}"
    covered, whole = sum(math.prod(extent) for _, extent in boxes), math.prod(shape)
    return "" if covered == whole else f"{whole - covered} of {whole} values are in no shard"


def _extent(shape: tuple[int, ...], local: tuple[int, ...]) -> tuple[int, ...]:
    """Return the size of a shard along every axis of the whole, which has axes that count layers or experts first."""
    return (*[1] * (len(shape) - len(local)), *local)


_Box = tuple[tuple[int, ...], tuple[int, ...]]


def _overlap(boxes: list[_Box]) -> _Box | None:
    """Return a box that shares a value with one before it. Those of a regular grid need no comparison with all."""
    starts = {offset for offset, _ in boxes}
    if len(starts) < len(boxes):
        seen: set[tuple[int, ...]] = set()
        return next((extent, offset) for offset, extent in boxes if offset in seen or seen.add(offset))  # type: ignore[func-returns-value]
    if len({extent for _, extent in boxes}) == 1:
        size = boxes[0][1]
        if all(not any(o % s for o, s in zip(offset, size, strict=True)) for offset, _ in boxes):
            return None
    ordered = sorted(boxes)
    for i, (offset, extent) in enumerate(ordered):
        for other, other_extent in ordered[i + 1 :]:
            if other[0] >= offset[0] + extent[0]:
                break
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, extent, other, other_extent, strict=True)):
                return other_extent, other
    return None
