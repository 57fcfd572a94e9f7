"""How many micro-batches of every model chunk a pipeline rank holds at a time, by the schedules of Megatron-Core 0.16.

Source: `pipeline_parallel/schedules.py`, `get_pp_rank_microbatches` and `get_schedule_table`. The group size per virtual
stage is Megatron-Core's default, pp.
"""

from functools import lru_cache


def in_flight(
    pp: int, rank: int, vp: int, num_microbatches: int, *, has_extra_warmup: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Return the fullest moments of a rank: for each of them, micro-batches in flight by chunk.

    A moment that another one exceeds in every chunk is left out. has_extra_warmup: of overlapped expert communication.
    """
    if vp == 1 or pp == 1:
        return ((min(num_microbatches, pp - rank),),)
    full_groups, rest = divmod(num_microbatches, pp)
    return _interleaved(pp, rank, vp, min(full_groups, 4) * pp + rest, has_extra_warmup)  # then it repeats


@lru_cache(maxsize=4096)
def _interleaved(pp: int, rank: int, vp: int, num_microbatches: int, has_extra_warmup: bool) -> tuple[tuple[int, ...], ...]:
    forward = _chunk_order(pp, vp, num_microbatches)
    warmup = min(2 * (pp - rank - 1) + (vp - 1) * pp + has_extra_warmup, len(forward))
    counts = [forward[:warmup].count(chunk) for chunk in range(vp)]
    moments = {tuple(counts)}
    for done, chunk in enumerate(forward[warmup:]):
        counts[chunk] += 1
        moments.add(tuple(counts))
        counts[vp - 1 - forward[done]] -= 1  # the backward passes take the chunks in the opposite order
    return tuple(sorted(m for m in moments if not any(other != m and _covers(other, m) for other in moments)))


def _chunk_order(pp: int, vp: int, num_microbatches: int) -> list[int]:
    """Return the chunk of every forward pass: groups of pp micro-batches, each through all chunks."""
    order: list[int] = []
    for start in range(0, num_microbatches, pp):
        group = min(pp, num_microbatches - start)
        order += [chunk for chunk in range(vp) for _ in range(group)]
    return order


def _covers(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))
