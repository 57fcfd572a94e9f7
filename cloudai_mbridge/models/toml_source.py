"""A TOML file with the line of every key, and one line per mistake in it: place, value, remedy."""

import difflib
import io
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import islice
from operator import getitem
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from cloudai_mbridge.errors import BadInput, counted
from cloudai_mbridge.files.regular import NotRegular, read_regular
from cloudai_mbridge.models.credentials import holds_credential, shown_key
from cloudai_mbridge.training.credentials.find import is_secret

KeyPath = tuple[str | int, ...]

MOST_TOML = 128 << 20
_MOST_SHOWN = 20  # mistakes
# Former names of keys, from earlier releases of CloudAI and their files
_RENAMED = {"model_size": "model_recipe_name", "model_name": "model_family_name"}
_OFTEN_LEFT_OUT = {"model", "size"}
_WHOLE = {"parallelism": "parallel", "len": "length", "seq": "sequence"}
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
    def _lines(self) -> dict[KeyPath, int]:
        """Line numbers of key paths: best effort, for messages only (multi-line strings may confuse it)."""
        lines: dict[KeyPath, int] = {}
        table: KeyPath = ()
        arrays: dict[KeyPath, int] = {}
        for number, line in enumerate(self.text.split("\n"), 1):
            if header := _HEADER.match(line):
                table = _table_path(_split(header["name"]), bool(header["array"]), arrays)
                lines.setdefault(table, number)
            elif key := _KEY.match(line):
                lines.setdefault((*table, *_split(key["key"])), number)
        return lines


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
        hint = "; a key stands twice: leave one of them out" if "Cannot overwrite a value" in str(error) else ""
        raise BadInput(f"{path}: not valid TOML: {error}{hint}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: a number or nesting is too large to be read ({error})") from None
    if huge is not None:
        raise BadInput(f"{source.where(huge)}: does not fit into 64 bits, as a TOML integer must; use a smaller number")
    return source


def _find_huge_integer(data: Any, place: KeyPath = ()) -> KeyPath | None:
    """Return the place of an integer that does not fit into 64 bits."""
    if isinstance(data, int):
        return None if -(2**63) <= data < 2**63 else place
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return next((found for key, value in items if (found := _find_huge_integer(value, (*place, key)))), None)


def _table_path(names: list[str], is_array: bool, arrays: dict[KeyPath, int]) -> KeyPath:
    """Return the key path of a header, with the index of the current element after every array of tables."""
    path: KeyPath = ()
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


def explain(
    error: ValidationError, model: type[BaseModel], data: Any, source: TomlSource, prefix: KeyPath = ()
) -> list[str]:
    """Return one message per mistake, at most the first few. `prefix`: path of `data` in the file of `source`."""
    mistakes: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors():
        mistakes.setdefault(_path_in_data(detail, data), []).append(detail)
    shown = [
        f"{source.where((*prefix, *path))}: {_describe(path, details, model, data)}"
        for path, details in islice(mistakes.items(), _MOST_SHOWN)
    ]
    left = len(mistakes) - len(shown)
    return [*shown, f"{source.path}: {counted(left, 'more mistake')}; correct these first"] if left else shown


def _path_in_data(detail: ErrorDetails, data: Any) -> KeyPath:
    """Drop the tags of union branches from pydantic's location: keep the path to the user's value."""
    path: KeyPath = ()
    for part in detail["loc"]:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return (*path, part) if detail["type"] == "missing" else path
        path = (*path, part)
    return path


def _describe(path: KeyPath, details: Sequence[ErrorDetails], model: type[BaseModel], data: Any) -> str:
    first = details[0]
    if first["type"] == "extra_forbidden":
        hint = "; --allow-unknown-args leaves it out" if path[-2:-1] == ("cmd_args",) else ""
        return f"unknown key; {suggest_field(str(path[-1]), _fields_at(model, path[:-1]))}{hint}"
    if first["type"] == "missing":
        return "is missing; add it"
    value = reduce(getitem, path, data)
    if value == [] and any(detail["type"] == "too_short" for detail in details):
        return "[] is empty; list at least one value, or remove the key"
    # of a union, the member whose type fits
    if ours := next((detail for detail in details if detail["type"] == "value_error"), None):
        return f"{_shown(path, value)}{ours['ctx']['error']}"
    messages = (detail["msg"].removeprefix("Input should be ") for detail in details)
    wants = dict.fromkeys(text.split(", unable to parse")[0].split(", got a number")[0] for text in messages)
    return f"{_shown(path, value)}must be {' or '.join(wants)}"


def _shown(path: KeyPath, value: Any) -> str:
    """Show the value if it is short and not secret."""
    if any(is_secret(str(part)) for part in path) or "@" in repr(value) or holds_credential(value):
        return "(value hidden) "
    is_nested = isinstance(value, list) and any(isinstance(item, list | dict) for item in value)
    return "" if len(repr(value)) > 200 or isinstance(value, dict) or is_nested else f"{value!r} "


def suggest(name: str, known: Sequence[str]) -> str:
    """Return a remedy for an unknown name: the nearest known name, or all names."""
    near = difflib.get_close_matches(name[:100], known, 3, cutoff=0.4)
    return f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"known: {', '.join(known)}"


def suggest_field(name: str, fields: Mapping[str, FieldInfo]) -> str:
    """Return a remedy for an unknown key: the argument with this name in Megatron, or a key with similar spelling."""
    places = {key: getattr(field.json_schema_extra, "config", None) or "" for key, field in fields.items()}
    same = [key for key, place in places.items() if place.rpartition(".")[2] == name or key == _RENAMED.get(name)]
    same = same or [key for key, place in places.items() if place and _words(place.rpartition(".")[2]) == _words(name)]
    if same:
        return f"did you mean {same[0]!r}?"
    words = set(name[:100].split("_"))  # tensor_parallel is short for tensor_model_parallel_size
    spelled = {key: set(place.rpartition(".")[2].split("_")) for key, place in places.items() if len(words) > 1}
    more = {key: len(full - words - _OFTEN_LEFT_OUT) for key, full in spelled.items() if words < full}
    nearest = [key for key, number in more.items() if number == min(more.values())][:3]
    if not nearest and name.endswith("_size") and name.removesuffix("_size") in fields:
        nearest = [name.removesuffix("_size")]
    if nearest:
        return f"did you mean {' or '.join(map(repr, nearest))}?"
    return suggest(name, list(fields))


def _words(name: str) -> set[str]:
    """Return the words of a name that tell it from others: tensor_parallel is tensor_model_parallel_size."""
    return {_WHOLE.get(word, word) for word in name.split("_")} - {*_OFTEN_LEFT_OUT, "num", "number", "of"}


def _fields_at(model: type[BaseModel], path: KeyPath) -> dict[str, FieldInfo]:
    """Return the fields that the table at `path` may have, by their keys."""
    current: Any = model
    for part in path:
        if isinstance(part, int):
            continue
        field = next(f for name, f in current.model_fields.items() if part in (name, f.alias))
        current = _model_in(field.annotation)
    return {field.alias or name: field for name, field in current.model_fields.items()}


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, Union, types.UnionType):
        return next((m for arg in get_args(annotation) if (m := _model_in(arg))), None)
    return None
