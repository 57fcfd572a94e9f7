"""Turn pydantic's errors into one line per mistake: place, value, remedy."""

import difflib
import types
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import islice
from operator import getitem
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from cloudai_mbridge.errors import counted
from cloudai_mbridge.models.loading.toml_source import TomlSource
from cloudai_mbridge.models.values.credentials import holds_credential
from cloudai_mbridge.training.credentials.find import is_secret

Path = tuple[str | int, ...]

_MOST_SHOWN = 20
_LONGEST_NAME = 100


def explain(
    error: ValidationError, model: type[BaseModel], data: Any, source: TomlSource, prefix: Path = ()
) -> list[str]:
    """Return one message per mistake, at most the first few. `prefix`: path of `data` in the file of `source`."""
    mistakes: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors():
        mistakes.setdefault(_path_in_data(detail, data), []).append(detail)
    shown = [
        f"{source.where((*prefix, *path))}: {_describe(path, details, model, data)}"
        for path, details in islice(mistakes.items(), _MOST_SHOWN)
    ]
    left = len(mistakes) - len(shown)
    return [*shown, f"{source.path}: {counted(left, 'more mistake')}; correct these first"] if left else shown


def _path_in_data(detail: ErrorDetails, data: Any) -> Path:
    """Drop the tags of union branches from pydantic's location: keep the path to the user's value."""
    path: Path = ()
    for part in detail["loc"]:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return (*path, part) if detail["type"] == "missing" else path
        path = (*path, part)
    return path


def _describe(path: Path, details: Sequence[ErrorDetails], model: type[BaseModel], data: Any) -> str:
    first = details[0]
    if first["type"] == "extra_forbidden":
        hint = "; --allow-unknown-args leaves it out" if path[-2:-1] == ("cmd_args",) else ""
        return f"unknown key; {suggest_field(str(path[-1]), _fields_at(model, path[:-1]))}{hint}"
    if first["type"] == "missing":
        return "is missing; add it"
    value = reduce(getitem, path, data)
    if value == [] and any(detail["type"] == "too_short" for detail in details):
        return "[] is empty; list at least one value, or remove the key"
    if first["type"] == "value_error":
        return f"{_shown(path, value)}{first['ctx']['error']}"
    messages = (detail["msg"].removeprefix("Input should be ") for detail in details)
    wants = dict.fromkeys(text.split(", unable to parse")[0].split(", got a number")[0] for text in messages)
    return f"{_shown(path, value)}must be {' or '.join(wants)}"


def _shown(path: Path, value: Any) -> str:
    """Show the value if it is short and not secret."""
    if any(is_secret(str(part)) for part in path) or "@" in repr(value) or holds_credential(value):
        return "(value hidden) "
    is_nested = isinstance(value, list) and any(isinstance(item, list | dict) for item in value)
    return "" if len(repr(value)) > 200 or isinstance(value, dict) or is_nested else f"{value!r} "


def suggest(name: str, known: Sequence[str]) -> str:
    """Return a remedy for an unknown name: the nearest known name, or all names."""
    near = difflib.get_close_matches(name[:_LONGEST_NAME], known, 3, cutoff=0.4)
    return f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"known: {', '.join(known)}"


# Former names of keys, from earlier releases of CloudAI and their files
_RENAMED = {"model_size": "model_recipe_name", "model_name": "model_family_name"}


def suggest_field(name: str, fields: Mapping[str, FieldInfo]) -> str:
    """Return a remedy for an unknown key: the argument with this name in Megatron, or a key with similar spelling."""
    places = {key: getattr(field.json_schema_extra, "config", None) or "" for key, field in fields.items()}
    same = [key for key, place in places.items() if place.rpartition(".")[2] == name or key == _RENAMED.get(name)]
    return f"did you mean {same[0]!r}?" if same else suggest(name, list(fields))


def _fields_at(model: type[BaseModel], path: Path) -> dict[str, FieldInfo]:
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
