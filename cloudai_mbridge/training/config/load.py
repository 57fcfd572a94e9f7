"""Read a config file strictly: an unknown key or a value of the wrong type is refused by name."""

import difflib
import json
import types
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cloudai_mbridge.training.config.sections import ConfigContainer

T = TypeVar("T")


class ConfigError(ValueError):
    """A config file that cannot be read as a ConfigContainer."""


def load_config(path: Path) -> ConfigContainer:
    """Read `path` (JSON).

    Raises:
        ConfigError: unreadable file, broken JSON, unknown key, missing key or wrong type.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        return config_from_dict(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def config_from_dict(data: Any) -> ConfigContainer:
    """Build the container from plain data."""
    return _build(ConfigContainer, data, "")


def _build(cls: type[T], data: Any, where: str) -> T:
    if not isinstance(data, dict):
        raise ConfigError(f"{where or 'config'}: a table is needed, got {data!r}")
    hints = get_type_hints(cls)
    for key in data:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(hints)}"
            raise ConfigError(f"{_join(where, key)}: unknown key; {hint}")
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name not in data and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{_join(where, f.name)}: missing")
    return cls(**{key: _value(hints[key], value, _join(where, key)) for key, value in data.items()})


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _value(hint: Any, value: Any, where: str) -> Any:
    if is_dataclass(hint):
        return _build(hint, value, where)  # type: ignore[arg-type]
    if hint is float and type(value) is int:
        return float(value)
    if not _matches(hint, value):
        raise ConfigError(f"{where}: {value!r} is not {_describe(hint)}")
    return value


def _matches(hint: Any, value: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_matches(option, value) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_matches(get_args(hint)[0], item) for item in value)
    return type(value) is hint  # `type(...) is`: True is not an int here


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(option) for option in get_args(hint))
    return f"of type {getattr(hint, '__name__', hint)}"
