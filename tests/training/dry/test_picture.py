"""The picture of a pipeline's passes."""

import pytest

from cloudai_mbridge.training.dry.__main__ import _pipeline
from cloudai_mbridge.training.dry.picture import idle, schedule, text


def one_f_one_b(stage: int, stages: int, count: int) -> list[tuple[str, int, int]]:
    warm = min(stages - 1 - stage, count)
    passes = [("forward", 0, n) for n in range(warm)]
    for n in range(count - warm):
        passes += [("forward", 0, warm + n), ("backward", 0, n)]
    return passes + [("backward", 0, n) for n in range(count - warm, count)]


def test_one_forward_one_backward() -> None:
    bars = schedule([one_f_one_b(stage, 2, 3) for stage in range(2)], 1)
    assert text(bars) == "  0 01..0<21<.2<\n  1 .00<11<22<.."
    assert [bar.start for bar in bars[1]] == [1, 2, 4, 5, 7, 8]
    assert idle(bars) == pytest.approx((2 - 1) / (3 + 2 - 1))


def test_the_bubble_of_some_stages_or_of_unseen_passes_is_not_known() -> None:
    timelines = [one_f_one_b(stage, 2, 3) for stage in range(2)]
    assert _pipeline(timelines, 2, 3, 3)["idle"] == 0.25
    for few in (timelines[:1], [timelines[0], []], [[], []]):
        assert _pipeline(few, 2, 3, 3)["idle"] is None


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_the_bubble_is_that_of_all_micro_batches(stages: int) -> None:
    """Of a step of fewer follows that of all."""
    few, every = 2 * stages, 7 * stages + 1
    timelines = [one_f_one_b(stage, stages, few) for stage in range(stages)]
    assert _pipeline(timelines, stages, few, every)["idle"] == pytest.approx(
        (stages - 1) / (every + stages - 1), abs=1e-4
    )


def test_a_pass_that_nothing_feeds() -> None:
    with pytest.raises(ValueError, match="needs one"):
        schedule([[], [("forward", 0, 0)]], 1)
