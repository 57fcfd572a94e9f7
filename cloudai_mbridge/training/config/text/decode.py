"""Build config objects from plain data: the check of `schema.plain`, which makes objects of this installation."""

import enum
import functools
import importlib
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cloudai_mbridge.training.compat.versions import installed_version
from cloudai_mbridge.training.config.text.describe import class_path, describe_class
from cloudai_mbridge.training.schema.check import ReleaseCatalog
from cloudai_mbridge.training.schema.known_names import ACTIVATIONS, CLASS_PATHS, ENUMS, FUNCTIONS, dtype_name
from cloudai_mbridge.training.schema.messages import fail, is_tagged
from cloudai_mbridge.training.schema.tagged import enum_member
from cloudai_mbridge.training.schema.type_forms import Form, Section


class LiveCatalog(ReleaseCatalog):
    """Look classes up among those that annotations named, then among the known names: only those are imported."""

    def __init__(self, root: type) -> None:
        """Start from `root`, the class that the caller asks for."""
        super().__init__(installed_version())
        self._named: dict[str, type] = {class_path(root): root}

    def section(self, path: str) -> Section | None:
        """Return the config class at `path`, None where there is none."""
        cls = self.find_class(path)
        if cls is None:
            return None
        described = describe_class(cls)
        self._named.update(described.named)
        return described.section

    def find_class(self, path: str) -> type | None:
        """Return the class itself."""
        if path not in self._named and CLASS_PATHS.get(path) == path:
            found = import_name(*path.rsplit(".", 1))
            if isinstance(found, type):
                self._named[path] = found
        return self._named.get(path)

    def enum_class(self, path: str) -> type[enum.Enum] | None:
        """Return the enum at `path`, which an annotation or the known names name; None: not of this installation."""
        found: Any = self._named.get(path) or import_name(*ENUMS[path])
        return typing.cast(type[enum.Enum] | None, found)

    def members(self, path: str) -> Mapping[str, Any]:
        """Return name -> value of the enum at `path`, aliases of members included."""
        found = self.enum_class(path)
        return {} if found is None else {name: member.value for name, member in found.__members__.items()}

    def make(self, form: Form, value: Any, where: str) -> Any:
        """Return what the checked `value` stands for. Raises ConfigError: a class refuses its values."""
        maker = _MAKERS.get(form.kind)
        return value if maker is None else maker(form, value, where, self)


def _make_path(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    return Path(value["_args_"][0] if is_tagged(value) else value)


def _make_dtype(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    name = value["_target_"] if is_tagged(value) else value
    return getattr(torch, dtype_name(name).removeprefix("torch."))


def _make_callable(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    target = value["_target_"] if is_tagged(value) else value
    if (function := import_name(*FUNCTIONS[ACTIVATIONS.get(target, target)])) is None:
        fail(where, f"{target} is not part of this installation")
    if not is_tagged(value) or value.get("_partial_") is not True:
        return function
    keywords = {key: item for key, item in value.items() if key not in ("_target_", "_partial_", "_args_")}
    return functools.partial(function, *value.get("_args_", []), **keywords)


def _make_enum(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    found = catalog.enum_class(form.args[0])
    assert found is not None, "a member of it was found"
    return found[enum_member(form, value, where, catalog)]


def _make_config(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    if (cls := catalog.find_class(form.args[0])) is None:
        fail(where, f"{form.args[0]} is not part of this installation")
    try:
        return cls(**value)
    except Exception as error:  # whatever the rules of the class raise is a fault of the values
        fail(where, f"{cls.__name__} refuses these values: {error or type(error).__name__}")


_MAKERS: Mapping[str, Callable[[Form, Any, str, LiveCatalog], Any]] = {
    "float": lambda form, value, where, catalog: float(value),
    "tuple": lambda form, value, where, catalog: tuple(value),
    "path": _make_path,
    "dtype": _make_dtype,
    "callable": _make_callable,
    "enum": _make_enum,
    "config": _make_config,
}


def import_name(module: str, name: str) -> Any:
    """Import a name of the tables; None where this installation does not have it."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
