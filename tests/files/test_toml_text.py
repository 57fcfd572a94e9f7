"""TOML that we write reads back as what was written."""

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.documents import one_per_line, render_toml
from tests.cases import every
from tests.golden import Sentence

TEXT = st.text(alphabet=st.characters(blacklist_categories=("Cs",)), max_size=30)
SCALAR = st.one_of(
    TEXT,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.sampled_from([1e22, 1e-7, 5e-324]),
)
PLAIN_KEY = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)


@given(st.dictionaries(TEXT, TEXT, max_size=5))
@settings(max_examples=200, deadline=None, database=None)
def test_any_text_comes_back_on_lines_that_print(data: dict[str, str]) -> None:
    text = render_toml(data)
    assert tomllib.loads(text) == data
    assert all(line.isprintable() for line in text.split("\n"))


def test_half_of_a_surrogate_pair_is_refused(sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        render_toml({"a": "1", "b": "\ud800"})
    sentence(caught)


@given(st.lists(st.dictionaries(TEXT, st.one_of(SCALAR, st.dictionaries(TEXT, SCALAR, max_size=2)), max_size=3)))
@settings(max_examples=100, deadline=None, database=None)
def test_tables_come_back_from_a_line_each(tables: list[dict[str, Any]]) -> None:
    text = render_toml({"rows": one_per_line(tables)})
    assert tomllib.loads(text) == {"rows": tables}
    assert len(text.splitlines()) == len(tables) + 2


@given(
    st.dictionaries(
        PLAIN_KEY,
        st.one_of(
            SCALAR,
            st.lists(TEXT, max_size=4),
            st.lists(st.integers(-9, 9), max_size=4),
            st.dictionaries(PLAIN_KEY, SCALAR, max_size=3),
        ),
        max_size=5,
    )
)
@settings(max_examples=150, deadline=None, database=None)
def test_a_definition_comes_back(data: dict[str, Any]) -> None:
    back = tomllib.loads(render_toml(data))
    assert back == data
    assert {key: type(value) for key, value in back.items()} == {key: type(value) for key, value in data.items()}


@every(
    "data",
    [
        {"t": {"optimizer.lr": "1"}},
        {"t": {"a b": "1", 'a"b': "2", "a\\b": "3", "é": "4", "": "5"}},
        {"repos": [{"url": "u", "commit": "c"}, {"url": "v", "commit": "d", "mount_as": "/opt/x"}]},
        {"a": {"b": {"c": {"d": "deep"}}}},
        {"a": [[1, 2], [3]], "empty": [], "t": {}},
        {"a": [{"b": [{"c": 1}, {"c": 2}]}]},
    ],
)
def test_structures_come_back(data: dict[str, Any]) -> None:
    assert tomllib.loads(render_toml(data)) == data


@every(
    "text",
    [
        '"""',
        "'''",
        "\\",
        "\\u0041",
        "\\x41",
        "a\nb",
        "\r\n",
        "\t",
        "\x7f",
        "\x1b[31m",
        "\u2028",
        "\ufeff",
        "😀",
        "[[x]]",
        "# x",
        "= 1",
    ],
)
def test_nasty_text_comes_back(text: str) -> None:
    assert tomllib.loads(render_toml({"a": text, "b": [text], "t": {"c": text}})) == {
        "a": text,
        "b": [text],
        "t": {"c": text},
    }
