"""Write config objects as plain data that `decode` turns back into them."""

import enum
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import torch

from cloudai_mbridge.training.config.text.decode import import_name
from cloudai_mbridge.training.config.text.describe import class_path, section_of
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.schema.known_names import (
    CLASS_PATHS,
    FUNCTIONS,
    PARTIAL_PREFIX,
    PROCESS_FIELDS,
    RUNTIME_FIELDS,
)
from cloudai_mbridge.training.schema.messages import fail, join, show
from cloudai_mbridge.training.schema.plain import MAX_DEPTH
from cloudai_mbridge.training.schema.type_forms import ANY, Form, options_of


def encode(value: Any, where: str = "", form: Form = ANY, depth: int = 0) -> Any:
    """Return `value`, of a field of `form`, as plain data. Raises ConfigError: an object that no file can give back."""
    if depth > MAX_DEPTH:
        fail(where, f"nested deeper than {MAX_DEPTH} levels")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if is_config(value):
        return _encode_config(value, where, depth)
    if isinstance(value, enum.Enum):
        return {"_target_": class_path(type(value)), "_call_": True, "_args_": [value.value], "_name_": value.name}
    if isinstance(value, list | tuple):
        return _encode_items(value, where, form, depth)
    if isinstance(value, dict):
        return _encode_dict(value, where, form, depth)
    if isinstance(value, torch.dtype):
        return {"_target_": str(value), "_call_": False}
    if isinstance(value, PurePath):
        return {"_target_": "pathlib.Path", "_args_": [os.fspath(value)]}
    return _encode_object(value, where)


def is_config(value: object) -> bool:
    """Return whether `value` is written as a table of its own: a dataclass instance, or one of the known classes."""
    return (is_dataclass(value) and not isinstance(value, type)) or class_path(type(value)) in CLASS_PATHS


def _encode_config(value: Any, where: str, depth: int) -> dict[str, Any]:
    section = section_of(value)
    table: dict[str, Any] = {"_target_": section.path}
    for entry in fields(value) if is_dataclass(value) else ():
        described = section.fields.get(entry.name)
        if described is None or described.computed or entry.name in PROCESS_FIELDS:
            continue
        item = getattr(value, entry.name)
        try:
            table[entry.name] = encode(item, join(where, entry.name), described.form, depth + 1)
        except ConfigError:
            is_runtime = entry.name in RUNTIME_FIELDS and not is_config(item)  # an object of the running program
            if item is not entry.default and not is_runtime:
                raise
    return table


def _encode_items(value: Any, where: str, form: Form, depth: int) -> Any:
    wanted = "tuple" if isinstance(value, tuple) else "list"
    option = next(iter(options_of(form, wanted)), None)
    members: Sequence[Form] = [ANY] * len(value)
    if option is not None and (wanted == "list" or option.open_ended):
        members = option.args * len(value)
    elif option is not None and len(option.args) == len(value):
        members = option.args
    items = [
        encode(item, f"{where}[{index}]", member, depth + 1)
        for index, (item, member) in enumerate(zip(value, members, strict=True))
    ]
    if wanted == "tuple" and (option is None or options_of(form, "list")):
        return {"_target_": "tuple", "_args_": [items]}  # a bare list would come back as one
    return items


def _encode_dict(value: Mapping[Any, Any], where: str, form: Form, depth: int) -> dict[Any, Any]:
    tables = options_of(form, "dict")
    member = tables[0].args[1] if tables else ANY
    if "_target_" in value:
        fail(join(where, "_target_"), "free data cannot have this key: a file would read it as a class")
    for key in value:
        if type(key) not in (str, int):
            fail(where, f"the key {show(key)} is neither text nor an int")
    return {key: encode(item, join(where, key), member, depth + 1) for key, item in value.items()}


def _encode_object(value: Any, where: str) -> Any:
    if isinstance(value, functools.partial):
        name, arguments = _function_name(value.func), [*value.args, *value.keywords.values()]
        if not name.startswith(PARTIAL_PREFIX) or not all(type(item) in (int, float, str) for item in arguments):
            fail(where, f"{show(value)} cannot be written to a file")
        return {"_target_": name, "_partial_": True, "_args_": list(value.args), **value.keywords}
    if name := _function_name(value):
        return {"_target_": name, "_call_": False}
    if type(value).__name__ == "PipelineParallelLayerLayout":  # Megatron-Core parses the text in place
        return encode(value.input_data, where)
    fail(where, f"{show(value)} cannot be written to a file; add its name to known_names if it has one")


def _function_name(value: Any) -> str:
    """Return the known name of a function, "" without one."""
    known = (
        name
        for name, (module, attribute) in FUNCTIONS.items()
        if getattr(value, "__name__", None) == attribute and import_name(module, attribute) is value
    )
    return next(known, "") if callable(value) else ""
