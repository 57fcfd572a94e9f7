"""Config objects to plain data, YAML and JSON, and back.

`_target_` names classes, functions, dtypes and enum members, as in Megatron-Bridge's files; only names of `known_names`
and classes that annotations name are taken.
"""

import copy
import enum
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.text.classes import LiveCatalog, class_path, import_name, section_of
from cloudai_mbridge.training.config.text.summary import warn_rank_0
from cloudai_mbridge.training.config.text.yaml_text import MAX_CHARS, dump_yaml, parse_json, parse_yaml
from cloudai_mbridge.training.credentials.find import is_credential_key
from cloudai_mbridge.training.credentials.scrub import without_users
from cloudai_mbridge.training.errors import ConfigError, fail, join, show
from cloudai_mbridge.training.schema.check import MAX_DEPTH, check
from cloudai_mbridge.training.schema.forms import ANY, Form, options_of
from cloudai_mbridge.training.schema.known_names import (
    CLASS_PATHS,
    FUNCTIONS,
    PARTIAL_PREFIX,
    PROCESS_FIELDS,
    RUNTIME_FIELDS,
)

T = TypeVar("T")


def to_dict(obj: Any) -> dict[str, Any]:
    """Return `obj` (a config dataclass) as plain data.

    Left out are private fields, computed fields (`init=False`), process fields (`local_rank`) and fields that the
    training loop fills with objects of the running program. A default that has no name in files is left out as well.

    ConfigError: a field holds an object that no file can give back.
    """
    if not is_config(obj):
        raise ConfigError(f"{show(obj)} is not a config object")
    return dict(encode(obj))


def from_dict(cls: type[T], data: dict[str, Any]) -> T:
    """Build a `cls` from plain data; types follow the annotations, an int may stand for a float and nothing else.

    Tables that Megatron-Bridge wrote may have keys that do not exist here: they are dropped, with one warning.

    ConfigError: unknown or missing key, wrong type, or a `_target_` that may not be named.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{cls.__name__}: a table is needed, got {show(data)}")
    catalog = LiveCatalog(cls)
    built: T = check(Form("config", (class_path(cls),)), data, "", catalog)
    if catalog.dropped:
        keys = ", ".join(f"{where} = {show(value)}" for where, value in catalog.dropped.items())
        warn_rank_0(f"keys of Megatron-Bridge that do not exist here were dropped: {keys}")
    return built


def to_yaml(obj: Any, path: str | Path | None = None) -> str:
    """Return `obj` as YAML text, and write it to `path` if given."""
    text = dump_yaml(to_dict(obj))
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def from_yaml(cls: type[T], path: str | Path) -> T:
    """Read a `cls` from a YAML file, or from JSON if the file is called `*.json`.

    ConfigError: an unreadable file, or data that `from_dict` refuses; the message starts with the path.
    """
    parse = parse_json if Path(path).suffix == ".json" else parse_yaml
    try:
        with Path(path).open(encoding="utf-8") as file:
            return from_dict(cls, parse(file.read(MAX_CHARS + 1)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def resolved_yaml(config: ConfigContainer, path: str | Path | None = None) -> str:
    """Return the configuration as YAML, and write it to `path` if given.

    Left out are a key that is set in it, variables that are named like one, user and password in the URL of a service,
    tokens among a tokenizer's options.
    """
    shown = copy.copy(config)
    shown.logger = copy.copy(config.logger)
    shown.logger.comet_api_key = None
    if shown.logger.mlflow_tracking_uri:
        shown.logger.mlflow_tracking_uri = without_users(shown.logger.mlflow_tracking_uri)
    shown.env_vars = {name: value for name, value in config.env_vars.items() if not is_credential_key(name)}
    shown.tokenizer = copy.copy(config.tokenizer)
    options = config.tokenizer.hf_tokenizer_kwargs
    if options:
        shown.tokenizer.hf_tokenizer_kwargs = {k: v for k, v in options.items() if not is_credential_key(k)}
    return shown.to_yaml(path)


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
        if entry.name not in section.fields or entry.name in (*section.computed, *PROCESS_FIELDS):
            continue
        item = getattr(value, entry.name)
        try:
            table[entry.name] = encode(item, join(where, entry.name), section.fields[entry.name], depth + 1)
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
