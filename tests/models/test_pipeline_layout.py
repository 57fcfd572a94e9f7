"""Explicit pipeline layouts: what repeats is written out, up to a limit."""

import pytest

from cloudai_mbridge.models.pipeline_layout import layout_fault, num_stages, parse_layout
from tests.cases import every
from tests.golden import Sentence


def test_repeats_are_written_out() -> None:
    assert parse_layout("Et*2|(t*3|)*2mL") == ("Ett", "ttt", "ttt", "mL")


@every("text", ["Et*1000000000|tL", "E(t*99999)*99999|tL", f"Et*{'9' * 5000}L", "(Et*900L|)*900"])
def test_a_layout_of_too_many_symbols(sentence: Sentence, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_layout(text)
    sentence(caught)
    assert num_stages(text) == 0
    sentence(layout_fault(text, 2, None, 4, 0))


@every(
    ("text", "pp", "vp"),
    [
        *(("Ett|ttm|L", 3, None), ("Ett|tt|mL", 3, None), ("Ettttm|L", 2, None), ("EttttmL", 1, None)),
        *(("Et|t|t|tmL", 2, 2), ("E|t|t|t|tm|L", 3, 2), ("E|t|t|t|t||m|L", 4, 2)),
    ],
)
def test_multi_token_prediction_may_stand_off_the_last_rank(text: str, pp: int, vp: int | None) -> None:
    assert layout_fault(text, pp, vp, 4, 1) is None


@every(
    ("text", "pp", "vp"),
    [
        *(("Et|ttt|m|L", 2, 2), ("Et|t|ttm|L", 2, 2), ("Et|t|t|tm||L", 3, 2), ("E|t|t|t|t||m||L", 3, 3)),
        *(("E|tt|tt||m|L", 2, 3), ("Et|t|t|t|m|||L", 4, 2), ("Et|ttt|m|L", 2, None)),
    ],
)
def test_multi_token_prediction_behind_the_embedding_on_its_rank(
    sentence: Sentence, text: str, pp: int, vp: int | None
) -> None:
    fault = layout_fault(text, pp, vp, 4, 1)
    assert fault is not None
    sentence(fault)
