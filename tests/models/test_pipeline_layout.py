"""Explicit pipeline layouts: what repeats is written out, up to a limit."""

import pytest

from cloudai_mbridge.models.pipeline_layout import layout_fault, num_stages, parse_layout
from tests.cases import every


def test_repeats_are_written_out() -> None:
    assert parse_layout("Et*2|(t*3|)*2mL") == ("Ett", "ttt", "ttt", "mL")


@every("text", ["Et*1000000000|tL", "E(t*99999)*99999|tL", f"Et*{'9' * 5000}L", "(Et*900L|)*900"])
def test_a_layout_of_too_many_symbols(text: str) -> None:
    with pytest.raises(ValueError, match="it has more than 100000 symbols"):
        parse_layout(text)
    assert num_stages(text) == 0
    assert layout_fault(text, 2, None, 4, 0) == "it has more than 100000 symbols"
