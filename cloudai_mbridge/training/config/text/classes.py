"""Config classes of this installation: described by their annotations, and built from checked plain data."""

import dataclasses
import enum
import functools
import importlib
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

from cloudai_mbridge.training.compat.versions import installed_version
from cloudai_mbridge.training.errors import fail
from cloudai_mbridge.training.schema.check import Catalog, enum_member, is_tagged
from cloudai_mbridge.training.schema.forms import ANY, NONE, Form, Section, options_of, union
from cloudai_mbridge.training.schema.known_names import (
    ACTIVATIONS,
    CLASS_PATHS,
    ENUMS,
    FIELD_CLASSES,
    FUNCTIONS,
    KEY_ALIASES,
    dtype_name,
)

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


class LiveCatalog(Catalog):
    """Look classes up among annotated classes, then among the known names: only these are imported."""

    def __init__(self, root: type) -> None:
        """Start from `root`, the class that the caller requests."""
        super().__init__(installed_version())
        self._named: dict[str, type] = {class_path(root): root}

    def section(self, path: str) -> Section | None:
        """Return the config class at `path`, None if it does not exist."""
        cls = self.find_class(path)
        if cls is None:
            return None
        section, named = describe_class(cls)
        self._named.update(named)
        return section

    def find_class(self, path: str) -> type | None:
        """Return the class itself."""
        if path not in self._named and CLASS_PATHS.get(path) == path:
            found = import_name(*path.rsplit(".", 1))
            if isinstance(found, type):
                self._named[path] = found
        return self._named.get(path)

    def _enum_class(self, path: str) -> Any:
        """Return the enum at `path`, named by an annotation or the known names; None if this installation lacks it."""
        return self._named.get(path) or import_name(*ENUMS[path])

    def members(self, path: str) -> Mapping[str, Any]:
        """Return name -> value of the enum at `path`, aliases of members included."""
        found = self._enum_class(path)
        return {} if found is None else {name: member.value for name, member in found.__members__.items()}

    def make(self, form: Form, value: Any, where: str) -> Any:
        """Return the object for the checked `value`. Raises ConfigError: a class refuses its values."""
        tagged = is_tagged(value)
        match form.kind:
            case "float":
                return float(value)
            case "tuple":
                return tuple(value)
            case "path":
                return Path(value["_args_"][0] if tagged else value)
            case "dtype":
                return getattr(torch, dtype_name(value["_target_"] if tagged else value).removeprefix("torch."))
            case "callable":
                return _make_callable(value, where)
            case "enum":
                return self._enum_class(form.args[0])[enum_member(form, value, where, self)]
            case "config":
                if (cls := self.find_class(form.args[0])) is None:
                    fail(where, f"{form.args[0]} is not part of this installation")
                try:
                    return cls(**value)
                except Exception as error:  # any error of the class's rules is a fault of the values
                    fail(where, f"{cls.__name__} refuses these values: {error or type(error).__name__}")
        return value


def _make_callable(value: Any, where: str) -> Any:
    target = value["_target_"] if is_tagged(value) else value
    if (function := import_name(*FUNCTIONS[ACTIVATIONS.get(target, target)])) is None:
        fail(where, f"{target} is not part of this installation")
    if not is_tagged(value) or value.get("_partial_") is not True:
        return function
    keywords = {key: item for key, item in value.items() if key not in ("_target_", "_partial_", "_args_")}
    return functools.partial(function, *value.get("_args_", []), **keywords)


def import_name(module: str, name: str) -> Any:
    """Import a name of the tables; None if this installation lacks it."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def class_path(cls: type) -> str:
    """Return the `_target_` of `cls`."""
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def describe_class(cls: type) -> tuple[Section, Mapping[str, type]]:
    """Describe the fields of the dataclass `cls`, except private fields.

    Returns a section, and the classes and enums that the annotations name, by path.
    """
    named: dict[str, type] = {class_path(cls): cls}
    hints = _hints(cls)
    entries = dataclasses.fields(cls) if is_dataclass(cls) else ()
    public = [each for each in entries if not each.name.startswith("_")]
    aliases: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        aliases.update(KEY_ALIASES.get(base.__name__, {}) if _is_ours(base) else {})
    section = Section(
        class_path(cls),
        {each.name: _field_form(cls, each, hints.get(each.name, Any), named) for each in public},
        required=tuple(
            each.name for each in public if each.init and each.default is MISSING and each.default_factory is MISSING
        ),
        computed=tuple(each.name for each in public if not each.init),
        aliases=aliases,
        bases=tuple(class_path(base) for base in cls.__mro__[1:] if is_dataclass(base)),
        abstract=inspect.isabstract(cls),
    )
    return section, named


def section_of(config: object) -> Section:
    """Return the section of the class of `config`."""
    cls: type = type(config)
    return describe_class(cls)[0]


def _is_ours(cls: type) -> bool:
    return CLASS_PATHS.get(class_path(cls)) == class_path(cls)


def _field_form(cls: type, entry: "dataclasses.Field[Any]", hint: Any, named: dict[str, type]) -> Form:
    """Return the form of a field; FIELD_CLASSES and the type of the default complete the annotation."""
    classes = FIELD_CLASSES.get(cls.__name__, {}).get(entry.name) if _is_ours(cls) else None
    if classes is None:
        form = _form_of(hint, cls.__module__, named)
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


def _form_of(hint: Any, module: str, named: dict[str, type]) -> Form:
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

    def forms_of(*hints: Any) -> tuple[Form, ...]:
        return tuple(_form_of(each, module, named) for each in hints)

    if origin is None:
        return _class_form(hint, module, named)
    if origin is Literal:
        return Form("literal", arguments)
    if origin is Callable:
        return Form("callable")
    if origin in (Union, types.UnionType):
        return union(forms_of(*arguments))
    if origin is tuple:
        is_open_ended = len(arguments) == 2 and arguments[1] is Ellipsis
        return Form("tuple", forms_of(*(arguments[:1] if is_open_ended else arguments)), is_open_ended)
    if _stands_for(list, origin):
        return Form("list", forms_of(arguments[0]))
    if _stands_for(dict, origin) and len(arguments) == 2:
        return Form("dict", forms_of(*arguments))
    return Form("opaque", (getattr(origin, "__qualname__", str(origin)),))


def _stands_for(concrete: type, origin: Any) -> bool:
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
    kind = "opaque"
    if issubclass(hint, enum.Enum):
        kind = "enum"
    elif path in CLASS_PATHS or (is_dataclass(hint) and hint.__module__ == module):
        kind = "config"
    if kind != "opaque":
        named[path] = hint
    return Form(kind, (path,))
