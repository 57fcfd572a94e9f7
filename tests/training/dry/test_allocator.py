"""The model of torch's caching allocator: sizes by its rules, reuse, and what many sizes cost."""

import pytest

from cloudai_mbridge.training.dry.allocator import CachingAllocator

MIB = 1 << 20


def reserved(*requests: float) -> float:
    """Return the MiB reserved for requests in MiB; a negative one frees the last block of its size."""
    allocator, blocks = CachingAllocator(), dict[float, list[object]]()
    for size in requests:
        if size > 0:
            blocks.setdefault(size, []).append(allocator.allocate(int(size * MIB)))
        else:
            allocator.free(blocks[-size].pop())  # type: ignore[arg-type]
    return allocator.reserved / MIB


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ((1 / 2048,), 2),  # a small segment
        ((1, 1), 2),
        ((1, 1, 1), 4),
        ((1.5,), 20),  # a medium one, which others share
        ((9, 9), 20),
        ((9, 9, 9), 40),
        ((10,), 10),  # from here on one of its own
        ((11,), 12),
        ((64, -64, 64), 64),  # taken again
        ((64, -64, 32, 32), 64),  # split
        ((32, 32, -32, -32, 64), 128),  # two segments are no block of 64
        ((64, -64, 32, 32, -32, -32, 64), 64),  # parts of one become one again
        ((64, 32, -64, -32, 32), 96),  # the smallest that is large enough is taken
        ((64, -64, 1), 66),  # small ones have segments of their own
    ],
)
def test_reserved(requests: tuple[float, ...], expected: float) -> None:
    assert reserved(*requests) == expected


def test_nothing_is_lost_among_many_requests() -> None:
    """All free blocks of a segment are one again when everything has been given back."""
    allocator = CachingAllocator()
    sizes = [(7919 * number) % (24 * MIB) + 1 for number in range(500)]
    live = [allocator.allocate(size) for size in sizes]
    before = allocator.reserved
    for number in (*range(0, 500, 3), *range(1, 500, 3), *range(2, 500, 3)):
        allocator.free(live[number])
    assert sum(block.size for block in allocator._blocks.values()) == before
    assert all(block.before is block.behind is None for block in allocator._blocks.values())
    assert [allocator.allocate(size) for size in sizes]
    assert allocator.reserved == before
