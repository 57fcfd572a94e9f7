"""Describe config classes by their annotations: class -> section, annotation -> form."""

import dataclasses
import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from cloudai_mbridge.training.schema.known_names import CLASS_PATHS, FIELD_CLASSES, KEY_ALIASES
from cloudai_mbridge.training.schema.type_forms import ANY, NONE, Field, Form, Section, union

_SCALARS: Mapping[Any, Form] = {
    Any: ANY,
    object: ANY,
    inspect.Parameter.empty: ANY,
    None: NONE,
    type(None): NONE,
    bool: Form("bool"),
    int: Form("int"),
    float: Form("float"),
    str: Form("str"),
    Path: Form("path"),
    torch.dtype: Form("dtype"),
    list: Form("list", (ANY,)),
    tuple: Form("tuple", (ANY,), True),
    dict: Form("dict", (ANY, ANY)),
    Callable: Form("callable"),
    typing.Callable: Form("callable"),
}


@dataclasses.dataclass(frozen=True)
class Described:
    """A config class as a section, with the classes and enums that its annotations name, by path."""

    section: Section
    named: Mapping[str, type]


def class_path(cls: type) -> str:
    """Return what `_target_` says for `cls`."""
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def describe_class(cls: type) -> Described:
    """Describe the fields of the dataclass `cls`; private ones are not among them."""
    named: dict[str, type] = {class_path(cls): cls}
    entries = dataclasses.fields(cls) if is_dataclass(cls) else ()
    hints = _hints(cls)
    fields = {
        entry.name: _describe_field(cls, entry, hints.get(entry.name, Any), named)
        for entry in entries
        if not entry.name.startswith("_")
    }
    aliases: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        aliases.update(KEY_ALIASES.get(base.__name__, {}) if _is_ours(base) else {})
    bases = tuple(class_path(base) for base in cls.__mro__[1:] if is_dataclass(base))
    return Described(Section(class_path(cls), fields, aliases, bases, inspect.isabstract(cls)), named)


def _is_ours(cls: type) -> bool:
    return CLASS_PATHS.get(class_path(cls)) == class_path(cls)


def _describe_field(cls: type, entry: "dataclasses.Field[Any]", hint: Any, named: dict[str, type]) -> Field:
    form = _field_form(cls, entry.name, hint, named)
    if entry.default is not MISSING:
        form = _widen(form, entry.default)
    return Field(
        form,
        required=entry.init and entry.default is MISSING and entry.default_factory is MISSING,
        computed=not entry.init,
    )


def _field_form(cls: type, name: str, hint: Any, named: dict[str, type]) -> Form:
    """Return the form of a field; FIELD_CLASSES says more than the annotation where that is Any."""
    classes = FIELD_CLASSES.get(cls.__name__, {}).get(name) if _is_ours(cls) else None
    if classes is None:
        return form_of(hint, cls.__module__, named)
    form = union(tuple(Form("config", (CLASS_PATHS[each],)) for each in classes) or (Form("opaque", (name,)),))
    return union((form, NONE)) if type(None) in get_args(hint) else form


def _widen(form: Form, default: Any) -> Form:
    """Admit the type of the default where the annotation forgets it, as in `pipeline_dtype: torch.dtype = None`."""
    if default is None:
        return union((form, NONE))
    kinds = {option.kind for option in (form.args if form.kind == "union" else (form,))}
    if isinstance(default, bool) and not kinds & {"bool", "any"}:
        return union((form, Form("bool")))
    return form


def _hints(cls: type) -> dict[str, Any]:
    """Return the annotations of `cls`; one that cannot be resolved counts as Any and spoils no other."""
    try:
        return get_type_hints(cls)
    except Exception:  # a name imported for type checkers only, or text that is not a type: not the user's fault
        hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        for name, hint in vars(base).get("__annotations__", {}).items():
            hints[name] = _resolve(hint, base)
    return hints


def _resolve(hint: Any, owner: type) -> Any:
    holder = types.SimpleNamespace(__annotations__={"hint": hint}, __module__=owner.__module__)
    try:
        return get_type_hints(holder, globalns=vars(sys.modules[owner.__module__]), localns=dict(vars(owner)))["hint"]
    except Exception:  # see _hints
        return Any


def form_of(hint: Any, module: str, named: dict[str, type]) -> Form:
    """Turn an annotation of `module` into a form; config classes and enums are entered into `named` by their path."""
    hint = _unwrap(hint)
    try:
        if hint in _SCALARS:
            return _SCALARS[hint]
    except TypeError:  # unhashable
        return ANY
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return union(tuple(form_of(option, module, named) for option in arguments))
    if origin is Literal:
        return Form("literal", arguments)
    if origin is not None:
        return _generic_form(origin, arguments, module, named)
    return _class_form(hint, module, named)


def _unwrap(hint: Any) -> Any:
    while get_origin(hint) in (typing.Annotated, typing.Final, typing.ClassVar, dataclasses.InitVar):
        hint = get_args(hint)[0]
    if isinstance(hint, TypeVar):
        return hint.__bound__ or Any
    return getattr(hint, "__supertype__", hint)  # NewType


def _generic_form(origin: Any, arguments: tuple[Any, ...], module: str, named: dict[str, type]) -> Form:
    if origin is tuple:
        open_ended = len(arguments) == 2 and arguments[1] is Ellipsis
        members = arguments[:1] if open_ended else arguments
        return Form("tuple", tuple(form_of(member, module, named) for member in members), open_ended)
    if _is_abstract_of(origin, list):
        return Form("list", (form_of(arguments[0], module, named),))
    if _is_abstract_of(origin, dict) and len(arguments) == 2:
        return Form("dict", (form_of(arguments[0], module, named), form_of(arguments[1], module, named)))
    if origin is Callable:
        return Form("callable")
    return Form("opaque", (getattr(origin, "__qualname__", str(origin)),))


def _is_abstract_of(origin: Any, concrete: type) -> bool:
    """Say whether a `concrete` is what a file gives for `origin`: list for Sequence, dict for Mapping."""
    return origin is concrete or (
        getattr(origin, "__module__", "") == "collections.abc" and issubclass(concrete, origin)
    )


def _class_form(hint: Any, module: str, named: dict[str, type]) -> Form:
    """Let a file describe known classes and those of the annotating module itself.

    Any other dataclass is opaque, for what it does with its fields is unknown: a ModuleSpec imports what it names.
    """
    if not isinstance(hint, type):
        return Form("opaque", (getattr(hint, "__name__", str(hint)),))
    path = class_path(hint)
    if issubclass(hint, enum.Enum):
        named[path] = hint
        return Form("enum", (path,))
    if path in CLASS_PATHS or (is_dataclass(hint) and hint.__module__ == module):
        named[path] = hint
        return Form("config", (path,))
    return Form("opaque", (path,))
