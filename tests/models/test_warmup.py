"""The warm-up of a run that goes on from a checkpoint begins with its first step."""

from typing import Any

from cloudai_mbridge.models.test_definition import last_warmup_step
from tests.cases import every


@every(
    ("first", "warmup", "num_steps", "defined", "last"),
    [
        *((1, 3, 10, {}, 3), (1, 0, 10, {}, 0), (5, 3, 10, {}, 7), (5, 3, None, {}, 7)),
        *((5, 3, 6, {}, 5), (6, 3, 6, {}, 5), (7, 3, 6, {}, 6)),  # one step is left to measure
        (5, 2, 6, {"metrics": {"warmup_steps": 2}}, 6),
        (5, 5, 6, {"training_report": {"exclude_start_steps": 5}}, 9),
    ],
)
def test_the_last_step_of_the_warm_up(
    first: int, warmup: int, num_steps: int | None, defined: dict[str, Any], last: int
) -> None:
    assert last_warmup_step(first, warmup, num_steps, defined) == last
