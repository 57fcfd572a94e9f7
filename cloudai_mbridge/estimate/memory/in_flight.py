"""How many micro-batches of every model chunk a pipeline rank holds at a time, by the schedules of Megatron-Core 0.16.

Source: `pipeline_parallel/schedules.py`, `get_pp_rank_microbatches` and `get_schedule_table`. The group size per
virtual stage is Megatron-Core's default, pp.
"""

from functools import lru_cache

Moment = tuple[tuple[int, ...], int]


def in_flight(
    pp: int, rank: int, vp: int, num_microbatches: int, *, has_extra_warmup: bool = False
) -> tuple[Moment, ...]:
    """Return the fullest moments of a rank: micro-batches in flight by chunk, and whose backward pass begins.

    A moment that another one with the same backward pass exceeds in every chunk is left out. has_extra_warmup: of
    overlapped expert communication.
    """
    if vp == 1 or pp == 1:
        return (((min(num_microbatches, pp - rank),), 0),)
    full_groups, rest = divmod(num_microbatches, pp)
    return _interleaved(pp, rank, vp, min(full_groups, 4) * pp + rest, has_extra_warmup)  # then it repeats


@lru_cache(maxsize=4096)
def _interleaved(pp: int, rank: int, vp: int, num_microbatches: int, has_extra_warmup: bool) -> tuple[Moment, ...]:
    forward = _chunk_order(pp, vp, num_microbatches)
    warmup = min(2 * (pp - rank - 1) + (vp - 1) * pp + has_extra_warmup, len(forward))
    counts = [forward[:warmup].count(chunk) for chunk in range(vp)]
    moments: set[Moment] = set()
    for done, chunk in enumerate(forward):
        if warmup + done < len(forward):  # afterwards only backward passes are left
            counts[forward[warmup + done]] += 1
        backward = vp - 1 - chunk  # they take the chunks in the opposite order
        moments.add((tuple(counts), backward))
        counts[backward] -= 1
    return tuple(sorted(m for m in moments if not any(_exceeds(other, m) for other in moments)))


def _chunk_order(pp: int, vp: int, num_microbatches: int) -> list[int]:
    """Return the chunk of every forward pass: groups of pp micro-batches, each through all chunks."""
    order: list[int] = []
    for start in range(0, num_microbatches, pp):
        group = min(pp, num_microbatches - start)
        order += [chunk for chunk in range(vp) for _ in range(group)]
    return order


def _exceeds(one: Moment, other: Moment) -> bool:
    is_more = all(a >= b for a, b in zip(one[0], other[0], strict=True))
    return is_more and one != other and one[1] == other[1]
