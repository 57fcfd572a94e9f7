"""Whether shards cover every tensor exactly once: by boxes that do, and each way in which they do not."""

import pytest

from cloudai_mbridge.training.dry.places import Layout, distinct_ranks, saving_ranks
from cloudai_mbridge.training.dry.tiling import problems_of

Shard = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, bool]


def shard(
    offset: tuple[int, ...], local: tuple[int, ...], shape: tuple[int, ...] = (4, 6), saved: bool = True
) -> Shard:
    return ("w", shape, offset, local, 0, saved)


@pytest.mark.parametrize(
    "shards",
    [
        [shard((0, 0), (4, 6))],
        [shard((0, 0), (2, 6)), shard((2, 0), (2, 6))],
        [shard((0, 0), (4, 1)), shard((0, 1), (4, 5))],
        [shard((0, 0), (4, 6)), shard((0, 0), (4, 6), saved=False)],
        [shard((layer, 0, 0), (4, 6), (3, 4, 6)) for layer in range(3)],  # layers are an axis of their own
    ],
    ids=["whole", "halves", "uneven", "replica", "layers"],
)
def test_shards_that_tile(shards: list[Shard]) -> None:
    assert problems_of(shards) == []


@pytest.mark.parametrize(
    ("shards", "why"),
    [
        ([shard((0, 0), (2, 6))], "12 of 24 values are in no shard"),
        ([shard((0, 0), (4, 6))] * 2, "overlap"),
        ([shard((0, 0), (3, 6)), shard((2, 0), (2, 6))], "overlap"),
        ([shard((0, 0), (4, 6)), shard((2, 0), (4, 6))], "outside"),
        ([shard((0, 0), (4, 6)), shard((0, 0), (4, 5), (4, 5))], "disagree"),
        ([shard((layer, 0, 0), (4, 6), (3, 4, 6)) for layer in range(2)], "24 of 72 values are in no shard"),
    ],
    ids=["gap", "twice", "overlap", "outside", "shapes", "missing layer"],
)
def test_shards_that_do_not(shards: list[Shard], why: str) -> None:
    (problem,) = problems_of(shards)
    assert problem.startswith("w: ")
    assert why in problem


ORDER = ("tp", "cp", "dp", "pp")


@pytest.mark.parametrize(
    ("layout", "distinct", "saving"),
    [
        (Layout(1, 1, 1, 1, 1, 1, ORDER), [0], [0]),
        (Layout(2, 1, 2, 4, 1, 2, ORDER), [0, 2, 7, 8, 10, 15], [0, 1, 8, 9]),
        (Layout(1, 1, 2, 8, 8, 1, ORDER), [0, 3, 7, 8, 11, 15], list(range(16))),
        (Layout(2, 2, 1, 2, 4, 1, ORDER), [0, 7], [0, 1, 2, 3]),
        (Layout(2, 1, 2, 2, 1, 2, ("tp", "cp", "pp", "dp")), [0, 2, 5, 7], [0, 1, 2, 3]),
    ],
)
def test_which_ranks_are_built(layout: Layout, distinct: list[int], saving: list[int]) -> None:
    assert distinct_ranks(layout) == distinct
    assert saving_ranks(layout) == saving
