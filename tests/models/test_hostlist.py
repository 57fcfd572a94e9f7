"""Node lists as Slurm writes them."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.slurm_values import expand_hostlist
from tests.cases import every
from tests.golden import Sentence


@every(
    ("text", "expected"),
    [
        ("", []),
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        (" a , b ", ["a", "b"]),
        ("gb200-[1-3]", ["gb200-1", "gb200-2", "gb200-3"]),
        ("gb200-[001-003,7],login", ["gb200-001", "gb200-002", "gb200-003", "gb200-7", "login"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[5]", ["n5"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("n[1-2],n[2-3]", ["n1", "n2", "n3"]),
        ("n[1,1]", ["n1"]),
    ],
)
def test_lists(text: str, expected: list[str]) -> None:
    assert expand_hostlist(text) == expected


@every(
    "text",
    [
        *("n[", "n[]", "n[1", "n[1-]", "n[-1]", "n[a-b]", "n[x]", "n[1-2-3]", "n[1;2]", f"n[1-{'9' * 5000}]"),
        *("n[1,x]", "n[3-1,5]", "n[1,,2]", "n[1-2,a-b]", "n]", "n1]2"),
    ],
)
def test_what_is_no_list_is_bad_input(sentence: Sentence, text: str) -> None:
    with pytest.raises(BadInput) as caught:
        expand_hostlist(text)
    sentence(caught)


LONG = {
    "many brackets": ("n" + "[0-1]" * 50, 0),
    "one name": ("n" + "[1]" * 5000, 1),
    "one by one": (",".join(f"node{i}" for i in range(100_000)), 100_000),
    "commas": ("," * 100_000, 0),
    "open brackets": ("n[" * 50_000, 0),
    "twice the same": ("n[1-90000],n[1-90000]", 90_000),
}


@every(("text", "number"), LONG.values())
def test_a_long_text_costs_no_time(text: str, number: int) -> None:
    started = time.process_time()
    try:
        assert len(expand_hostlist(text)) == number
    except BadInput:
        assert number == 0
    assert time.process_time() - started < 5


PREFIX = st.text("abz-", min_size=1, max_size=4)
WIDTHS = st.integers(1, 4)
RANGE = st.tuples(st.integers(0, 40), st.integers(0, 12), WIDTHS)  # first, how many more, digits
BRACKET = st.lists(RANGE, min_size=1, max_size=3)
NODE = st.tuples(PREFIX, st.lists(st.tuples(BRACKET, st.text("-x", max_size=2)), max_size=2))


def _written(ranges: list[tuple[int, int, int]]) -> tuple[str, list[str]]:
    """Return a bracket's text, and its numbers by a naive generator."""
    text, numbers = [], []
    for first, more, width in ranges:
        text.append(f"{first:0{width}}" + (f"-{first + more:0{width}}" if more else ""))
        numbers += [f"{number:0{width}}" for number in range(first, first + more + 1)]
    return f"[{','.join(text)}]", numbers


@given(st.lists(NODE, max_size=3))
@settings(max_examples=200, deadline=None, database=None)
def test_a_naive_generator_agrees(nodes: list[tuple[str, list[tuple[list[tuple[int, int, int]], str]]]]) -> None:
    texts, expected = [], []
    for prefix, brackets in nodes:
        written = [(*_written(ranges), tail) for ranges, tail in brackets]
        texts.append(prefix + "".join(text + tail for text, _, tail in written))
        choices = [[number + tail for number in numbers] for _, numbers, tail in written]
        expected += [prefix + "".join(choice) for choice in itertools.product(*choices)]
    assert expand_hostlist(",".join(texts)) == list(dict.fromkeys(expected))


@every("text", ["n[1-99999][1-99999]", "n[1-99999],m[1-99999]", "n[" + ",".join(["1-99999"] * 11) + "]"])
def test_a_list_of_too_many_nodes(sentence: Sentence, text: str) -> None:
    with pytest.raises(BadInput) as caught:
        expand_hostlist(text)
    sentence(caught)
