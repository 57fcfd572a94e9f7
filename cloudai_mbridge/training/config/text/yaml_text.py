"""YAML and JSON as plain data.

PyYAML only splits the text into events, no constructor of it runs; scalars follow YAML 1.2 (`yes` and `12:30:00` are
text, `1e-5` is a number). Repeated keys, tags and endless aliases are refused.
"""

import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,import-not-found,unused-ignore]

from cloudai_mbridge.training.errors import ConfigError, show
from cloudai_mbridge.training.schema.check import MAX_DEPTH

MAX_CHARS = 1 << 20  # a config is a few KiB
MAX_VALUES = 100_000  # after aliases are expanded
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
# No leading zeros: YAML 1.1 reads 010 as eight, 1.2 as ten
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*|(?=[eE])))([eE][-+]?[0-9]+)?")
_STR_TAGS = ("!", "tag:yaml.org,2002:str")
_SET_TAG = "tag:yaml.org,2002:set"  # of adapters, Megatron-Bridge writes sets
# Errors of PyYAML's scanner for broken escapes, numbers and directives, in addition to its own errors
_SCAN_ERRORS = (yaml.YAMLError, ValueError, OverflowError, RecursionError, LookupError)


def scalar(text: str) -> Any:
    """Return the value of an unquoted scalar. Raises ConfigError: a number that no int or float holds."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        if _INT.fullmatch(text):
            return int(text)
        if _HEX.fullmatch(text):
            return int(text, 16)
    except ValueError as error:
        raise ConfigError(f"{show(text)} has too many digits") from error
    return _finite(text) if _FLOAT.fullmatch(text) else text


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ConfigError(f"{show(text)} is too large for a float; write .inf to mean infinity")
    return value


def parse_yaml(text: str) -> Any:
    """Read one YAML document. Raises ConfigError: broken, a key twice, a tag, too large or too deep for a config."""
    _check_size(text)
    try:
        return _Builder(iter(yaml.parse(text, Loader=yaml.SafeLoader))).document()
    except ConfigError:
        raise
    except _SCAN_ERRORS as error:
        raise ConfigError(_one_line(error)) from error


def read_yaml(path: Path) -> Any:
    """Read a file of one YAML document. Raises ConfigError: as `parse_yaml`, or text that is not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    return parse_yaml(text)


def parse_json(text: str) -> Any:
    """Read one JSON document, NaN and Infinity included. Raises ConfigError: broken, a key twice, nested too deep."""
    _check_size(text)
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_float=_finite)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(_one_line(error)) from error


def dump_yaml(data: Any) -> str:
    """Write data so that `parse_yaml` and YAML 1.1 readers return it unchanged. Raises ConfigError: it is not plain."""
    try:
        return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=4096))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(_one_line(error)) from error


def _check_size(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise ConfigError(f"longer than {MAX_CHARS} characters")


def _one_line(error: Exception) -> str:
    text = re.sub(r"\s+", " ", str(error) or type(error).__name__)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ConfigError(f"the key {show(key)} is given twice")
        table[key] = value
    return table


class _Builder:
    """Build plain data from YAML events, each alias as a copy of its own."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._values = 0

    def document(self) -> Any:
        next(self._events)  # the stream
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return None
        value = self._value(next(self._events), 0)
        next(self._events)  # the end of the document
        if not isinstance(next(self._events), yaml.StreamEndEvent):
            raise ConfigError("more than one YAML document")
        return value

    def _value(self, event: Any, depth: int) -> Any:
        self._count(1, event)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{_at(event)}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise ConfigError(f"{_at(event)}: the alias *{event.anchor} stands before or inside its anchor")
            value, size = self._anchors[event.anchor]
            self._count(size, event)
            return copy.deepcopy(value)
        before = self._values
        value = self._new_value(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, self._values - before + 1)
        return value

    def _count(self, values: int, event: Any) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise ConfigError(f"{_at(event)}: more than {MAX_VALUES} values")

    def _new_value(self, event: Any, depth: int) -> Any:
        is_scalar = isinstance(event, yaml.ScalarEvent)
        if event.tag == _SET_TAG and isinstance(event, yaml.MappingStartEvent):
            return list(self._mapping(depth))
        if event.tag is not None and not (is_scalar and event.tag in _STR_TAGS):
            raise ConfigError(f"{_at(event)}: the tag {show(event.tag)} is not read")
        if is_scalar:
            return scalar(event.value) if event.tag is None and event.style is None else event.value
        if not isinstance(event, yaml.SequenceStartEvent):
            return self._mapping(depth)
        items: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._value(event, depth + 1))
        return items

    def _mapping(self, depth: int) -> dict[Any, Any]:
        table: dict[Any, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._value(event, depth + 1)
            if type(key) not in (str, int):
                raise ConfigError(f"{_at(event)}: {show(key)} cannot be a key; put it in quotes to mean text")
            if key in table:
                raise ConfigError(f"{_at(event)}: the key {show(key)} is given twice")
            table[key] = self._value(next(self._events), depth + 1)
        return table


def _at(event: Any) -> str:
    return f"line {event.start_mark.line + 1}, column {event.start_mark.column + 1}"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc,unused-ignore]
    """Write every list and table in full, and quote texts that either YAML version would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: Any, text: str) -> Any:
    is_ambiguous = text in _WORDS or _INT.fullmatch(text) or _HEX.fullmatch(text) or _FLOAT.fullmatch(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if is_ambiguous else None)


_Dumper.add_representer(str, _represent_str)
