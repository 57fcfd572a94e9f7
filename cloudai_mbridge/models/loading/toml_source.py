"""A TOML file with the line of every key, so that an error can point at its place."""

import io
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.regular import NotRegular, read_regular
from cloudai_mbridge.models.values.credentials import shown_key

MOST_TOML = 128 << 20
_TWICE = "Cannot overwrite a value"  # tomllib's message
_HEADER = re.compile(r"\s*\[(?P<array>\[)?\s*(?P<name>[^\]]+?)\s*\]")
_KEY = re.compile(r"""\s*(?P<key>"[^"]*"|'[^']*'|[A-Za-z0-9_.\- ]+?)\s*=""")


@dataclass(frozen=True)
class TomlSource:
    """A parsed file."""

    path: Path
    text: str
    data: dict[str, Any]

    def where(self, key_path: Sequence[str | int]) -> str:
        """Return "file:line: key" for a path such as ("Tests", 0, "id"); the line of the nearest parent if needed."""
        starts = (tuple(key_path[:length]) for length in range(len(key_path), 0, -1))
        line = next((self._lines[start] for start in starts if start in self._lines), None)
        place = f"{self.path}:{line}" if line else str(self.path)
        return f"{place}: {dotted(key_path)}" if key_path else place

    @cached_property
    def _lines(self) -> dict[tuple[str | int, ...], int]:
        return _key_lines(self.text)


def dotted(key_path: Sequence[str | int]) -> str:
    """Return a.b[0].c for ("a", "b", 0, "c"), without the value that a key may contain after its name."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{shown_key(part)}" for part in key_path).lstrip(".")


def read_toml(path: Path) -> TomlSource:
    """Read and parse `path`; BadInput, with the parser's line and column, if it is not valid TOML in UTF-8."""
    try:
        with io.TextIOWrapper(io.BytesIO(read_regular(path, MOST_TOML)), encoding="utf-8-sig") as decoded:
            text = decoded.read()
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; check the path") from None
    except NotRegular as error:
        raise BadInput(f"{path}: is {error.strerror}; give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as UTF-8 text ({error})") from None
    try:
        source = TomlSource(path, text, tomllib.loads(text))
        huge = _find_huge_integer(source.data)
    except tomllib.TOMLDecodeError as error:
        hint = "; a key stands twice: leave one of them out" if _TWICE in str(error) else ""
        raise BadInput(f"{path}: not valid TOML: {error}{hint}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: a number or nesting is too large to be read ({error})") from None
    if huge is not None:
        raise BadInput(f"{source.where(huge)}: does not fit into 64 bits, as a TOML integer must; use a smaller number")
    return source


def _find_huge_integer(data: Any, place: tuple[str | int, ...] = ()) -> tuple[str | int, ...] | None:
    """Return the place of an integer that does not fit into 64 bits."""
    if isinstance(data, int):
        return None if -(2**63) <= data < 2**63 else place
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return next((found for key, value in items if (found := _find_huge_integer(value, (*place, key)))), None)


def _key_lines(text: str) -> dict[tuple[str | int, ...], int]:
    """Map key paths to line numbers: best effort, for messages only (multi-line strings may confuse it)."""
    lines: dict[tuple[str | int, ...], int] = {}
    table: tuple[str | int, ...] = ()
    arrays: dict[tuple[str | int, ...], int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if header := _HEADER.match(line):
            table = _table_path(_split(header["name"]), bool(header["array"]), arrays)
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *_split(key["key"])), number)
    return lines


def _table_path(names: list[str], is_array: bool, arrays: dict[tuple[str | int, ...], int]) -> tuple[str | int, ...]:
    """Return the key path of a header, with the index of the current element after every array of tables."""
    path: tuple[str | int, ...] = ()
    for i, name in enumerate(names):
        path = (*path, name)
        if is_array and i == len(names) - 1:
            arrays[path] = arrays.get(path, -1) + 1
        if path in arrays:
            path = (*path, arrays[path])
    return path


def _split(name: str) -> list[str]:
    parts = re.findall(r""""[^"]*"|'[^']*'|[^.]+""", name)
    return [part.strip().strip("\"'") for part in parts]
