"""Names of points: readable where they can be, and always safe, stable and distinct."""

import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cloudai_mbridge.files.text import label, labels, readable, slug
from tests.cases import every

SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TEXT = st.text(alphabet=st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=300)
KINDS = [TEXT, st.integers(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)]
NASTY = [
    "",
    ".",
    "..",
    "../../etc",
    "/",
    "a/b",
    "a\\b",
    "-rf",
    "$(id)",
    "`id`",
    "a b",
    "a\nb",
    "é",
    "x" * 500,
    ".hidden",
]


@every(
    ("coordinates", "expected"),
    [
        ({}, "single"),
        ({"tp": 2, "mb": 1}, "tp2-mb1"),
        ({"lr": 0.001, "use_tokendrop": True}, "lr0.001-use_tokendroptrue"),
        ({"env.NCCL_DEBUG": "WARN"}, "env.NCCL_DEBUGWARN"),
    ],
)
def test_an_ordinary_point_is_named_after_its_values(coordinates: dict[str, Any], expected: str) -> None:
    assert label(coordinates) == expected


def test_a_label_does_not_change_between_versions() -> None:
    """Results of different days are compared by label: a change here is a change of the published names."""
    assert label({"task": "a b"}) == "taska_b-0779fd42-f1d2c783"


@every("text", NASTY)
def test_a_nasty_name_becomes_a_safe_one(text: str) -> None:
    assert SAFE.fullmatch(slug(text))
    assert SAFE.fullmatch(label({"task": text}))
    assert len(label({"task": text})) <= 120


@given(TEXT)
@settings(max_examples=150, deadline=None, database=None)
def test_any_text_becomes_a_safe_file_name(text: str) -> None:
    name = slug(text)
    assert SAFE.fullmatch(name)
    assert len(name) <= 100
    assert slug(text) == name
    if SAFE.fullmatch(text) and len(text) <= 80 and text.strip("._-") == text:
        assert name == text


@given(st.lists(TEXT, min_size=2, max_size=6, unique=True))
@settings(max_examples=100, deadline=None, database=None)
def test_different_texts_get_different_names(texts: list[str]) -> None:
    assert len({slug(text) for text in texts}) == len(texts)


def _two_points(kinds: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[tuple[dict[str, Any], dict[str, Any]]]:
    """Two combinations of one sweep: the same axes, each with values of its own type."""
    return st.tuples(st.fixed_dictionaries(kinds), st.fixed_dictionaries(kinds))


@given(st.dictionaries(TEXT, st.sampled_from(KINDS), min_size=1, max_size=4).flatmap(_two_points))
@settings(max_examples=150, deadline=None, database=None)
def test_two_points_of_one_sweep_get_different_labels(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    one, other = pair
    assert (label(one) == label(other)) is (repr(one) == repr(other))
    assert SAFE.fullmatch(label(one))
    assert len(label(one)) <= 120


def test_labels_of_many_points() -> None:
    """Short labels are the names; if one is cut, the axes on which the points differ are, and the rest is shared."""
    short = [{"tp": 1, "pp": 2}, {"tp": 2, "pp": 2}]
    assert labels(short) == (["tp1-pp2", "tp2-pp2"], "")
    assert labels([]) == ([], "")
    tail = {"a_rather_long_name_of_an_axis": 1, "another_rather_long_name": [1, 2], "and_one_more": "x", "last": True}
    long = [{"tp": tp, **tail, "mb": mb} for tp, mb in ((1, 2), (1, 4))]
    assert labels(long[:1]) == ([label(long[0])], "")
    names, shared = labels(long)
    assert names == ["mb=2", "mb=4"]
    assert shared == "tp=1,a_rather_long_name_of_an_axis=1,another_rather_long_name=[1, 2],and_one_more=x,last=true"
    assert labels([*long, {**tail, "tp": 8}])[0][-1] == "tp=8"  # an included point without an axis


@every(
    ("value", "text"),
    [
        (59962.4, "59,962"),
        (1000, "1,000"),
        (999.94, "999.9"),
        (1.46382, "1.464"),
        (0.0, "0"),
        (5.336e-05, "0.00005336"),
    ],
)
def test_a_readable_number_has_no_exponent(value: float, text: str) -> None:
    assert readable(value) == text
