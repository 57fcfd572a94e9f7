"""Change a config from the command line: `train.train_iters=20`, `~profiling`.

Values are YAML scalars, lists and tables, typed against the field; nothing is evaluated: `${...}` stays text.
"""

import difflib
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, NoReturn, TypeVar

from cloudai_mbridge.training.config.text.classes import LiveCatalog, section_of
from cloudai_mbridge.training.config.text.yaml_text import parse_yaml, scalar
from cloudai_mbridge.training.errors import ConfigError, fail, join, nearest, show
from cloudai_mbridge.training.schema.check import MAX_DEPTH, check
from cloudai_mbridge.training.schema.forms import ANY, Form, Section, describe, options_of

T = TypeVar("T")
_Undo = list[tuple[Any, str, Any]]


def apply_overrides(container: T, overrides: Sequence[str]) -> T:
    """Apply `key=value` and `~key` in order to `container`, in place, and return it; a later one wins.

    `~section` sets an optional section to None. A key below a section that is None makes the section with its defaults
    first. Derived values are not recomputed: `validate()` does that.

    ConfigError: the first override that cannot be applied; `container` is then as it was before the call.
    """
    undo: _Undo = []
    try:
        for text in overrides:
            _apply(container, text, undo)
    except ConfigError:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)
        raise
    return container


def _apply(container: Any, text: str, undo: _Undo) -> None:
    if not isinstance(text, str):
        fail(show(text), "an override is text: key=value or ~key")
    key, equals, value = text.strip().partition("=")
    key = key.strip()
    if key.startswith("+") and _is_in_table(container, key.lstrip("+")):  # Hydra's form for a new key
        key = key.lstrip("+")
    if key.startswith("+"):
        fail(key, f"every key of the config exists already, none can be added; write {key.lstrip('+')}=VALUE to set it")
    if key.startswith("~"):
        if equals:
            fail(key, f"~ takes no value; write {key} or {key[1:]}=VALUE")
        _set(container, _parts(key[1:]), None, undo)
        return
    if not equals:
        fail(key or text, "write key=value to set it, or ~key to set it to null")
    parts = _parts(key)
    if not (value := value.strip()):
        fail(key, f"no value; write {key}=null, or {key}='\"\"' for empty text")
    try:  # lists, tables and quoted text are YAML; all else is one scalar, so `run: 1 #2` stays text
        read = parse_yaml(value) if value[0] in "[{\"'" else scalar(value)
    except ConfigError as error:
        fail(key, f"{show(value)} cannot be read: {error}")
    _set(container, parts, read, undo)


def _is_in_table(container: Any, key: str) -> bool:
    """Return whether a key is below a table, such as env_vars, which takes any."""
    owner = container
    for part in key.split(".")[:-1]:
        owner = getattr(owner, part.strip(), None)
        if isinstance(owner, dict):
            return True
    return False


def _parts(key: str) -> list[str]:
    parts = [part.strip() for part in key.split(".")]
    if not all(parts) or len(parts) > MAX_DEPTH:
        fail(show(key), "the key is a dotted path such as train.train_iters")
    return parts


def _set(container: Any, parts: list[str], value: Any, undo: _Undo) -> None:
    owner, where = container, ""
    for depth, part in enumerate(parts):
        section, is_last = section_of(owner), depth == len(parts) - 1
        at, name = join(where, part), section.field_of(part)
        if name is None:
            fail(at, f"unknown key; {_suggestion(owner, section, part, where, deeper=not is_last)}")
        if name in section.computed:
            fail(at, "is computed, it cannot be set")
        where, form = at, section.fields[name]
        if is_last:
            _assign(owner, name, check(form, value, where, LiveCatalog(type(owner))), where, undo)
            return
        below = getattr(owner, name)
        tables = options_of(form, "dict", "any")
        if tables and (isinstance(below, dict) or below is None):
            new = _with_item(below or {}, parts[depth + 1 :], value, tables[0], where)
            _assign(owner, name, new, where, undo)
            return
        if below is None:
            below = _make_section(form, where, parts[depth + 1], LiveCatalog(type(owner)))
            _assign(owner, name, below, where, undo)
        if isinstance(below, list | tuple):
            fail(where, f"{show(below)} is a list: give it as a whole, {where}=[...]")
        if not is_dataclass(below):
            remedy = f"; give a table, {where}={{...}}, or start from ~{where}"
            is_section = options_of(form, "config")
            fail(where, f"{show(below)} has no keys below it{remedy if is_section else ''}")
        owner = below


def _suggestion(owner: Any, section: Section, part: str, where: str, deeper: bool) -> str:
    """Suggest the nearest key; a key of a section that was written without the section comes first."""
    if not where and not deeper:
        for name in section.fields:
            below = getattr(owner, name, None)
            if is_dataclass(below) and section_of(below).field_of(part) is not None:
                return f"did you mean {name}.{part}?"
    keys = section.keys()
    if not where and not difflib.get_close_matches(part[:200], keys, 1):
        return f"sections: {', '.join(keys)}"
    return nearest(part, keys, f"valid keys of {type(owner).__name__}")


def _make_section(form: Form, where: str, below: str, catalog: LiveCatalog) -> Any:
    """Build an absent section with its defaults, if the annotation leaves no choice of class."""
    paths = [option.args[0] for option in options_of(form, "config")]
    if not paths:
        fail(where, f"is null, and {describe(form)} has no key {below}")
    if len(paths) > 1:
        _fail_whole(where, f"is null and may be any of {describe(form)}", "_target_: CLASS")
    section = catalog.section(paths[0])
    cls = catalog.find_class(paths[0])
    if section is None or cls is None or section.abstract:
        fail(where, f"is null, and {paths[0]} cannot be built here")
    if section.field_of(below) is None:
        fail(join(where, below), f"unknown key; {nearest(below, section.keys(), f'valid keys of {cls.__name__}')}")
    if section.required:
        fact = f"is null and {cls.__name__} cannot do without {', '.join(section.required)}"
        _fail_whole(where, fact, f"{section.required[0]}: ...")
    try:
        return cls()
    except Exception as error:  # whatever the class raises
        fail(where, f"is null and cannot be made: {error or type(error).__name__}")


def _fail_whole(where: str, fact: str, inner: str) -> NoReturn:
    fail(where, f"{fact}; give the whole section, {where}={{{inner}}}")


def _with_item(table: dict[Any, Any], parts: list[str], value: Any, form: Form, where: str) -> dict[Any, Any]:
    """Return a copy of a free table with one item set, tables in between made on the way."""
    member = form.args[1] if form.kind == "dict" else ANY
    key, *rest = parts
    where = join(where, key)
    if key == "_target_":
        fail(where, "a class is named in a whole table only")
    if not rest:
        return {**table, key: check(member, value, where, LiveCatalog(dict))}
    inner = table.get(key, {})
    tables = options_of(member, "dict", "any")
    if not isinstance(inner, dict) or not tables:
        fail(where, f"{show(inner)} has no keys below it")
    return {**table, key: _with_item(inner, rest, value, tables[0], where)}


def _assign(owner: Any, name: str, value: Any, where: str, undo: _Undo) -> None:
    old = getattr(owner, name)
    try:
        setattr(owner, name, value)
    except Exception as error:  # a frozen section, or a property with rules of its own
        fail(where, f"cannot be set to {show(value)}: {error or type(error).__name__}")
    undo.append((owner, name, old))
