"""Strict parsing of JSON that other programs may have written."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

from cloudai_mbridge.errors import shown

_MOST_LEVELS = 50  # of a value that is passed on
_NOT_FINITE = ("nan", "inf", "-inf")


def _number(value: Any) -> Any:
    """Accept numbers, and the texts for numbers that JSON cannot represent."""
    if isinstance(value, bool) or (isinstance(value, str) and value not in _NOT_FINITE):
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return value


Number = Annotated[float, BeforeValidator(_number)]


def parse_json(text: bytes) -> Any:
    """Return JSON as values.

    ValueError: not JSON, or a duplicate key in an object: readers would differ about which value applies.
    RecursionError: it is nested too deep.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} appears twice")
        found[key] = value
    return found


def is_deep(value: Any, levels: int = _MOST_LEVELS) -> bool:
    """Return whether a value is nested deeper than anything that mbridge writes."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(is_deep(item, levels - 1) for item in items)
