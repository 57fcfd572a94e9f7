"""Torch's caching allocator of one GPU and stream, without memory: how much it reserves for a row of requests.

Facts of torch 2.x (c10/cuda/CUDACachingAllocator): sizes are multiples of 512 B; requests up to 1 MiB share segments of
2 MiB, those below 10 MiB segments of 20 MiB, larger ones have a segment of their own, a multiple of 2 MiB; the smallest
free block that is large enough is taken, and split; neighbours that are free become one. A request that no block can
hold reserves a segment, and no segment is given back. With expandable segments there is one that grows, so that what is
reserved is what is in use at most.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

_UNIT, _SMALL, _MEDIUM = 512, 1 << 20, 10 << 20
_SMALL_SEGMENT, _MEDIUM_SEGMENT, _MULTIPLE = 2 << 20, 20 << 20, 2 << 20


@dataclass(eq=False)
class Block:
    """A part of a segment, and its neighbours there. number: in order of making, which decides among equal sizes."""

    size: int
    number: int
    is_small: bool
    is_free: bool = True
    before: "Block | None" = None
    behind: "Block | None" = None


class CachingAllocator:
    """reserved: bytes of all segments."""

    def __init__(self) -> None:
        self.reserved = 0
        self._count = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, Block] = {}

    def allocate(self, size: int) -> Block:
        """Return a block of at least this size, bytes."""
        size = max(-(-size // _UNIT) * _UNIT, _UNIT)
        is_small = size <= _SMALL
        free = self._free[is_small]
        place = bisect_left(free, (size, 0))
        block = self._blocks[free.pop(place)[1]] if place < len(free) else self._segment(size, is_small)
        block.is_free = False
        rest = block.size - size
        if rest >= _UNIT if is_small else rest > _SMALL:
            behind = self._made(rest, is_small)
            behind.before, behind.behind = block, block.behind
            if block.behind is not None:
                block.behind.before = behind
            block.size, block.behind = size, behind
            insort(free, (rest, behind.number))
        return block

    def free(self, block: Block) -> None:
        """Take a block back."""
        block.is_free = True
        for other in (block.before, block.behind):
            if other is not None and other.is_free:
                self._forget(other)
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                    if block.before is not None:
                        block.before.behind = block
                else:
                    block.behind = other.behind
                    if block.behind is not None:
                        block.behind.before = block
        insort(self._free[block.is_small], (block.size, block.number))

    def _segment(self, size: int, is_small: bool) -> Block:
        if is_small:
            size = _SMALL_SEGMENT
        elif size < _MEDIUM:
            size = _MEDIUM_SEGMENT
        else:
            size = -(-size // _MULTIPLE) * _MULTIPLE
        self.reserved += size
        return self._made(size, is_small)

    def _made(self, size: int, is_small: bool) -> Block:
        block = Block(size, self._count, is_small)
        self._blocks[block.number] = block
        self._count += 1
        return block

    def _forget(self, block: Block) -> None:
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.size, block.number))]
        del self._blocks[block.number]
