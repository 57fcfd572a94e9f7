"""Build config objects from plain data: the check of `schema.plain`, which makes objects of this installation."""

import enum
import functools
import importlib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cloudai_mbridge.training.compat.versions import installed_version
from cloudai_mbridge.training.config.text.describe import class_path, describe_class
from cloudai_mbridge.training.schema.known_names import ACTIVATIONS, CLASS_PATHS, ENUMS, FUNCTIONS, dtype_name
from cloudai_mbridge.training.schema.messages import fail, is_tagged
from cloudai_mbridge.training.schema.releases import Catalog
from cloudai_mbridge.training.schema.tagged import enum_member
from cloudai_mbridge.training.schema.type_forms import Form, Section


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
        """Return the enum at `path`, named by an annotation or the known names; None if this installation lacks it."""
        found: Any = self._named.get(path) or import_name(*ENUMS[path])
        return typing.cast(type[enum.Enum] | None, found)

    def members(self, path: str) -> Mapping[str, Any]:
        """Return name -> value of the enum at `path`, aliases of members included."""
        found = self.enum_class(path)
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
                found = self.enum_class(form.args[0])
                assert found is not None, "a member of it was found"
                return found[enum_member(form, value, where, self)]
            case "config":
                return self._make_config(form.args[0], value, where)
        return value

    def _make_config(self, path: str, value: Any, where: str) -> Any:
        if (cls := self.find_class(path)) is None:
            fail(where, f"{path} is not part of this installation")
        try:
            return cls(**value)
        except Exception as error:  # any error of the class's rules is a fault of the values
            fail(where, f"{cls.__name__} refuses these values: {error or type(error).__name__}")


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
