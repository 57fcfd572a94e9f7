"""Rendering of TOML that reads back unchanged."""

from collections.abc import Iterable, Mapping
from typing import Any

import tomlkit
from tomlkit.items import Array, Item

from cloudai_mbridge.errors import BadInput


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
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


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
