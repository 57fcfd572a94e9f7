"""JSON of others: no key stands twice."""

import json
import time

import pytest

from cloudai_mbridge.files.documents import parse_json
from tests.golden import Sentence


def test_values_are_read() -> None:
    assert parse_json(b'{"a": [1, {"a": 2}], "b": null}') == {"a": [1, {"a": 2}], "b": None}


def test_a_key_that_stands_twice_is_refused_in_linear_time(sentence: Sentence) -> None:
    text = json.dumps({f"k{i}": 1 for i in range(200_000)})[:-1] + ', "k199999": 2}'
    started = time.process_time()
    with pytest.raises(ValueError) as caught:
        parse_json(text.encode())
    sentence(caught)
    assert time.process_time() - started < 5
