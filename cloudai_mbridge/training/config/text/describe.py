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
from cloudai_mbridge.training.schema.type_forms import ANY, NONE, Field, Form, Section, options_of, union

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
    """Return the `_target_` of `cls`."""
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def describe_class(cls: type) -> Described:
    """Describe the fields of the dataclass `cls`, except private fields."""
    named: dict[str, type] = {class_path(cls): cls}
    hints = _hints(cls)
    fields = {
        entry.name: Field(
            _field_form(cls, entry, hints.get(entry.name, Any), named),
            required=entry.init and entry.default is MISSING and entry.default_factory is MISSING,
            computed=not entry.init,
        )
        for entry in (dataclasses.fields(cls) if is_dataclass(cls) else ())
        if not entry.name.startswith("_")
    }
    aliases: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        aliases.update(KEY_ALIASES.get(base.__name__, {}) if _is_ours(base) else {})
    bases = tuple(class_path(base) for base in cls.__mro__[1:] if is_dataclass(base))
    return Described(Section(class_path(cls), fields, aliases, bases, inspect.isabstract(cls)), named)


def section_of(config: object) -> Section:
    """Return the section of the class of `config`."""
    cls: type = type(config)
    return describe_class(cls).section


def _is_ours(cls: type) -> bool:
    return CLASS_PATHS.get(class_path(cls)) == class_path(cls)


def _field_form(cls: type, entry: "dataclasses.Field[Any]", hint: Any, named: dict[str, type]) -> Form:
    """Return the form of a field; FIELD_CLASSES and the type of the default complete the annotation."""
    classes = FIELD_CLASSES.get(cls.__name__, {}).get(entry.name) if _is_ours(cls) else None
    if classes is None:
        form = form_of(hint, cls.__module__, named)
    else:
        configs = tuple(Form("config", (CLASS_PATHS[each],)) for each in classes)
        form = union(configs or (Form("opaque", (entry.name,)),))
        if type(None) in get_args(hint):
            form = union((form, NONE))
    if entry.default is None:  # as in `pipeline_dtype: torch.dtype = None`
        return union((form, NONE))
    forgets_bool = isinstance(entry.default, bool) and not options_of(form, "bool", "any")
    return union((form, Form("bool"))) if forgets_bool else form


def _hints(cls: type) -> dict[str, Any]:
    """Return the annotations of `cls`; an unresolvable annotation becomes Any and does not affect the others."""
    try:
        return get_type_hints(cls)
    except Exception:  # a name imported for type checkers only, or text that is not a type: not the user's fault
        hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        for name, hint in vars(base).get("__annotations__", {}).items():
            holder = types.SimpleNamespace(__annotations__={name: hint}, __module__=base.__module__)
            try:
                found = get_type_hints(holder, globalns=vars(sys.modules[base.__module__]), localns=dict(vars(base)))
            except Exception:  # as above
                found = {name: Any}
            hints.update(found)
    return hints


def form_of(hint: Any, module: str, named: dict[str, type]) -> Form:
    """Turn an annotation of `module` into a form; config classes and enums are entered into `named` by their path."""
    while get_origin(hint) in (typing.Annotated, typing.Final, typing.ClassVar, dataclasses.InitVar):
        hint = get_args(hint)[0]
    # A type variable stands for its bound, a NewType for its supertype
    hint = (hint.__bound__ or Any) if isinstance(hint, TypeVar) else getattr(hint, "__supertype__", hint)
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
    """Return whether a file gives a `concrete` for `origin`: list for Sequence, dict for Mapping."""
    return origin is concrete or (
        getattr(origin, "__module__", "") == "collections.abc" and issubclass(concrete, origin)
    )


def _class_form(hint: Any, module: str, named: dict[str, type]) -> Form:
    """Let a file describe known classes and classes of the annotating module itself.

    Any other dataclass is opaque, as its use of its fields is unknown: a ModuleSpec imports the name in it.
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
