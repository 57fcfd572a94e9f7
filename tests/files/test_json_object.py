"""Forms of the JSON documents that commands print."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudai_mbridge.commands.console import render_json
from cloudai_mbridge.files.documents import fill, json_object
from tests.golden import Sentence

PART = json_object("Part", "One part.", name=str, value=float | None)
WHOLE = json_object("Whole", "All parts.", path=Path, parts=[PART])


def test_values_take_precedence_over_the_record() -> None:
    record = SimpleNamespace(name="a", value=1.0, other="is left out")
    assert fill(PART, record) == {"name": "a", "value": 1.0}
    assert fill(PART, record, value=2.0) == {"name": "a", "value": 2.0}


def test_a_key_that_record_or_form_lacks(sentence: Sentence) -> None:
    with pytest.raises(AttributeError, match="value"):
        fill(PART, SimpleNamespace(name="a"))
    with pytest.raises(TypeError) as caught:
        fill(PART, SimpleNamespace(name="a", value=1.0), size=3)
    sentence(caught)
    for document in ({"path": Path("x")}, {"parts": [], "path": Path("x")}, {"path": Path("x"), "parts": [], "c": 1}):
        with pytest.raises(TypeError) as caught:
            render_json(document, WHOLE)
        sentence(caught)


def test_a_document_is_printed_by_its_form() -> None:
    parts = [{"name": "a\ud800", "value": float("nan")}, {"name": "b", "value": 0.5}]
    printed = json.loads(render_json({"path": Path("x/y"), "parts": parts}, WHOLE))
    assert printed["path"] == "x/y"
    assert [part["value"] for part in printed["parts"]] == [None, 0.5]
    assert printed["parts"][0]["name"].startswith("a")
