"""Build config objects from plain data that `plain_check.check` has let pass."""

import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cloudai_mbridge.training.config.text.describe import LiveCatalog
from cloudai_mbridge.training.schema.architectures import as_here
from cloudai_mbridge.training.schema.known_names import ACTIVATIONS, CLASS_PATHS, FUNCTIONS, dtype_name, kind_of_target
from cloudai_mbridge.training.schema.messages import fail, is_tagged
from cloudai_mbridge.training.schema.plain import accepts, check, config_path, fitting, is_left_out
from cloudai_mbridge.training.schema.tagged import enum_member
from cloudai_mbridge.training.schema.type_forms import ANY, Form, field_key


def decode(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    """Check `value` against `form` and build what it stands for.

    Raises:
        ConfigError: the data does not fit, or a class refuses its values.
    """
    check(form, value, where, catalog)
    return build(form, value, where, catalog)


def build(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    """Build what the checked `value` stands for."""
    options = fitting(form, value, catalog)
    chosen = options[0]
    if len(options) > 1:
        chosen = next(option for option in options if accepts(option, value, where, catalog))
    return _BUILDERS.get(chosen.kind, _build_same)(chosen, value, where, catalog)


def _build_same(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    return value


def _build_float(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    return float(value)


def _build_list(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    return [build(form.args[0], item, f"{where}[{index}]", catalog) for index, item in enumerate(value)]


def _build_tuple(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    items = value["_args_"][0] if is_tagged(value) else value
    members = form.args * len(items) if form.open_ended else form.args
    return tuple(build(member, item, where, catalog) for member, item in zip(members, items, strict=True))


def _build_dict(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    return {key: build(form.args[1], item, f"{where}.{key}", catalog) for key, item in value.items()}


def _build_path(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    return Path(value["_args_"][0] if is_tagged(value) else value)


def _build_dtype(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    name = value["_target_"] if is_tagged(value) else value
    return getattr(torch, dtype_name(name).removeprefix("torch."))


def _build_callable(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    target = value["_target_"] if is_tagged(value) else value
    module, name = FUNCTIONS[ACTIVATIONS.get(target, target)]
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        fail(where, f"{target} is not part of this installation")
    if not is_tagged(value) or value.get("_partial_") is not True:
        return function
    keywords = {key: item for key, item in value.items() if key not in ("_target_", "_partial_", "_args_")}
    return functools.partial(function, *value.get("_args_", []), **keywords)


def _build_enum(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    found = catalog.enum_class(form.args[0])
    assert found is not None, "a member of it was found"
    return found[enum_member(form, value, where, catalog)]


def _build_config(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    path = config_path(form, value, where, catalog)
    cls, section = catalog.find_class(path), catalog.section(path)
    if cls is None or section is None:
        fail(where, f"{path} is not part of this installation")
    arguments = {}
    for key, item in as_here(value, section, where).items():
        name = field_key(section, key)
        if name is None or is_left_out(section, value, key, item, catalog):
            continue
        if not section.fields[name].computed:
            arguments[name] = build(section.fields[name].form, item, f"{where}.{key}" if where else key, catalog)
    try:
        return cls(**arguments)
    except Exception as error:  # whatever the rules of the class raise is a fault of the values
        fail(where, f"{cls.__name__} refuses these values: {error or type(error).__name__}")


def _build_any(form: Form, value: Any, where: str, catalog: LiveCatalog) -> Any:
    if is_tagged(value):
        kind = kind_of_target(value["_target_"])
        path = CLASS_PATHS.get(value["_target_"], value["_target_"])
        tagged = Form("tuple", (ANY,), True) if kind == "tuple" else Form(kind, (path,))
        return _BUILDERS[kind](tagged, value, where, catalog)
    if isinstance(value, list):
        return _build_list(Form("list", (ANY,)), value, where, catalog)
    if isinstance(value, dict):
        return _build_dict(Form("dict", (ANY, ANY)), value, where, catalog)
    return value


_Build = Callable[[Form, Any, str, LiveCatalog], Any]
_BUILDERS: Mapping[str, _Build] = {
    "any": _build_any,
    "float": _build_float,
    "list": _build_list,
    "tuple": _build_tuple,
    "dict": _build_dict,
    "path": _build_path,
    "dtype": _build_dtype,
    "callable": _build_callable,
    "enum": _build_enum,
    "config": _build_config,
}
