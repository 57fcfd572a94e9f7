"""Strict parsing of JSON of other programs, the forms of JSON that is printed, and TOML that reads back unchanged."""

import json
from collections.abc import Iterable, Mapping, Sequence
from types import GenericAlias
from typing import Annotated, Any

import tomlkit
from pydantic import BeforeValidator
from tomlkit.items import Array, Item
from typing_extensions import TypedDict  # the one that pydantic takes, before Python 3.12

from cloudai_mbridge.errors import BadInput, shown

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


def json_object(name: str, description: str, /, **types: Any) -> Any:
    """Return the type of a JSON object, from which pydantic prints it and makes its schema.

    name, description: in the schema. types: of the values, by key; [form] is a list of such objects.
    """
    forms = {key: GenericAlias(list, (form[0],)) if isinstance(form, list) else form for key, form in types.items()}
    found = TypedDict(name, forms)  # type: ignore[misc]
    found.__doc__ = description
    return found


def fill(form: Any, record: object, /, **values: Any) -> dict[str, Any]:
    """Return a JSON object: the given values, and those of the record's attributes that its other keys name.

    TypeError: a value's key is not one of the form's. AttributeError: the record lacks a key.
    """
    if unknown := sorted(values.keys() - form.__annotations__.keys()):
        raise TypeError(f"{form.__name__} has no {', '.join(unknown)}")
    return {key: values[key] if key in values else getattr(record, key) for key in form.__annotations__}


def is_deep(value: Any, levels: int = _MOST_LEVELS) -> bool:
    """Return whether a value is nested deeper than anything that mbridge writes."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(is_deep(item, levels - 1) for item in items)


def render_toml(document: Mapping[str, Any]) -> str:
    """Return plain data, or a document of tomlkit, as TOML in which every unprintable character is escaped.

    BadInput: a text contains a lone surrogate, which no file can hold.
    """
    text = tomlkit.dumps(document)  # line feeds in strings and keys are escaped, so the others end lines
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text[text.rfind("\n", 0, error.start) + 1 :].partition("\n")[0]
        raise BadInput(f"{line!a}: holds a lone surrogate, which cannot be written as UTF-8; rename it") from None
    odd = {ord(c) for c in text if not (c.isprintable() or c == "\n")}
    return text.translate({code: f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}" for code in odd})


def one_per_line(tables: Iterable[Mapping[str, Any]]) -> Array:
    """Return an array with a line for each of its tables."""
    array = tomlkit.array()
    for table in tables:
        array.add_line(inline(table), indent="  ")
    array.add_line(indent="")
    return array


def inline(value: Any) -> Item:
    """Return a value on one line, tables as { name = value, ... }."""
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend(map(inline, value))
        return array
    if not isinstance(value, Mapping):
        item: Item = tomlkit.item(value)
        return item
    table = tomlkit.inline_table()
    items = [(name, inline(each)) for name, each in value.items()]
    table.update(items)
    if items:
        items[0][1].trivia.indent = items[-1][1].trivia.trail = " "
    return table
