"""The order of the samples depends on what was consumed, and on nothing else."""

from collections import Counter
from itertools import islice

from cloudai_mbridge.training.data.loader import (
    Order,
    Share,
    epoch_length,
    global_batches,
    in_order,
    micro_batches,
    sharded,
    shuffled,
)
from tests.cases import every

LAYOUTS = [(mbs, dp) for mbs in (1, 2, 4) for dp in (1, 2, 4)]


def shares(mbs: int, dp: int) -> list[Share]:
    return [Share(mbs, rank, dp) for rank in range(dp)]


def order_of(kind: str, total: int, share: Share) -> Order:
    if kind == "in order":
        return in_order(total, total)
    return shuffled(total, total, 7) if kind == "shuffled" else sharded(total, 7, share)


def drawn(kind: str, total: int, mbs: int, dp: int, samples: int, consumed: int = 0) -> list[list[int]]:
    """Return what each rank reads while the run goes from `consumed` to `consumed + samples`."""
    assert samples % (mbs * dp) == 0
    readers = (micro_batches(order_of(kind, total, share), share, consumed) for share in shares(mbs, dp))
    return [[i for r in islice(reader, samples // (mbs * dp)) for i in r[0]] for reader in readers]


def in_global_order(per_rank: list[list[int]], mbs: int) -> list[int]:
    turns = len(per_rank[0]) // mbs
    return [i for turn in range(turns) for rank in per_rank for i in rank[turn * mbs : (turn + 1) * mbs]]


@every(("mbs", "dp"), LAYOUTS)
@every("kind", ["in order", "shuffled", "sharded"])
def test_every_sample_comes_once_per_epoch(kind: str, mbs: int, dp: int) -> None:
    epochs = 3
    per_rank = drawn(kind, 48, mbs, dp, epochs * 48)
    for epoch in range(epochs):
        part = slice(epoch * 48 // dp, (epoch + 1) * 48 // dp)
        assert Counter(i for rank in per_rank for i in rank[part]) == Counter(range(48))


@every(("mbs", "dp"), LAYOUTS)
@every("kind", ["in order", "shuffled"])
def test_the_global_batch_is_the_same_in_every_layout(kind: str, mbs: int, dp: int) -> None:
    """37 samples: no layout divides them, and batches go over the end of an epoch."""
    alone = drawn(kind, 37, 1, 1, 160)[0]
    assert in_global_order(drawn(kind, 37, mbs, dp, 160), mbs) == alone


@every(("mbs", "dp"), LAYOUTS)
@every("kind", ["in order", "shuffled", "sharded"])
def test_resuming_anywhere_goes_on_as_if_nothing_had_been(kind: str, mbs: int, dp: int) -> None:
    step = mbs * dp
    whole = drawn(kind, 37, mbs, dp, 10 * step)
    for steps in range(10):
        rest = drawn(kind, 37, mbs, dp, (10 - steps) * step, consumed=steps * step)
        assert rest == [rank[steps * mbs :] for rank in whole]


def test_in_order_is_what_the_mock_data_always_had() -> None:
    per_rank = drawn("in order", 100, 2, 2, 16)
    assert per_rank == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]


def test_epochs_are_shuffled_differently_by_seed_and_epoch() -> None:
    one, other = shuffled(50, 50, 1), shuffled(50, 50, 2)
    first, second = [one(i) for i in range(50)], [one(i) for i in range(50, 100)]
    assert first != second
    assert first != [other(i) for i in range(50)]
    assert first != list(range(50))
    assert first == [shuffled(50, 50, 1)(i) for i in range(50)]


def test_a_rank_of_sharded_data_keeps_to_its_part() -> None:
    per_rank = drawn("sharded", 40, 2, 4, 240)
    assert [(min(rank), max(rank)) for rank in per_rank] == [(0, 9), (10, 19), (20, 29), (30, 39)]


@every(
    ("total", "batch", "drop_last", "length"),
    [(37, 8, True, 32), (37, 8, False, 37), (32, 8, True, 32), (7, 8, True, 7), (8, 8, True, 8)],
)
def test_only_whole_batches_count_when_the_last_is_dropped(
    total: int, batch: int, drop_last: bool, length: int
) -> None:
    assert epoch_length(total, batch, drop_last) == length


def test_an_epoch_without_its_last_batch_leaves_other_samples_out_each_time() -> None:
    order = shuffled(37, 32, 5)
    epochs = [[order(i) for i in range(32 * e, 32 * (e + 1))] for e in range(6)]
    assert all(len(set(epoch)) == 32 for epoch in epochs)
    assert set().union(*epochs) == set(range(37))


def test_a_longer_epoch_fills_its_last_batch_from_its_beginning() -> None:
    order = in_order(5, 8)
    assert [order(i) for i in range(10)] == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]


@every(("mbs", "dp"), LAYOUTS)
def test_a_global_batch_holds_the_micro_batches_of_a_rank(mbs: int, dp: int) -> None:
    for share in shares(mbs, dp):
        order = shuffled(37, 37, 3)
        by_micro_batch = [own for own, _ in islice(micro_batches(order, share, 32), 4 * 16 // share.step)]
        by_batch = list(islice(global_batches(order, share, 32, lambda _: 16), 4))
        assert [i for own, _ in by_batch for i in own] == [i for own in by_micro_batch for i in own]
        assert [whole for _, whole in by_batch] == [[order(i) for i in range(a, a + 16)] for a in (32, 48, 64, 80)]


def test_a_ramp_changes_the_size_of_global_batches_and_no_order() -> None:
    sizes = {0: 2, 2: 2, 4: 4, 8: 6}
    requests = list(islice(global_batches(in_order(100, 100), Share(1, 1, 2), 0, sizes.__getitem__), 4))
    assert [whole for _, whole in requests] == [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11, 12, 13]]
    assert [own for own, _ in requests] == [[1], [3], [5, 7], [9, 11, 13]]
