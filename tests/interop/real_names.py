"""Print tables of a training loop as JSON: signatures, defaults, number formats, overlapped communication.

    python real_names.py PACKAGE [LAUNCHER_DIRECTORY] < {"module": ["name", ...] or null, ...}

PACKAGE is megatron.bridge, from the launcher's directory, or cloudai_mbridge. Of a module the named functions, classes
and methods are printed, by default all that it defines. Real are the modules; what Megatron-Bridge's import besides is
not (see `real_presets`). A default that JSON lacks is its `repr`, and a type is its name.
"""

import dataclasses
import importlib
import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

from real_presets import load_core, load_packages

MISSING = "<required>"


def plain(value: Any) -> Any:
    """Return a default in a form that does not depend on the package that it is of."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (type, types.FunctionType)):
        return value.__name__
    return repr(value)


def signature(function: Any) -> list[list[Any]] | str:
    """Return the parameters: name, or name and default; "" if there are none to read.

    Those that are given by name only follow a "*", sorted: their order is of no matter.
    """
    is_data = dataclasses.is_dataclass(function)
    try:
        parameters = [*inspect.signature(function.__init__ if is_data else function).parameters.values()][is_data:]
    except ValueError:  # an exception class, for one
        return ""
    found: list[list[Any]] = []
    by_name: list[list[Any]] = []
    for each in parameters:
        sign = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        text = [f"{sign}{each.name}"] + ([] if each.default is each.empty else [plain(each.default)])
        (by_name if each.kind is each.KEYWORD_ONLY else found).append(text)
    return [*found, *([["*"], *sorted(by_name)] if by_name else [])]


def defined_in(module: Any) -> list[str]:
    """Return the names that a module defines itself, with those of its classes."""
    found = []
    for name, value in vars(module).items():
        if isinstance(value, types.ModuleType) or getattr(value, "__module__", module.__name__) != module.__name__:
            continue
        members = vars(value).items() if isinstance(value, type) else ()
        found += [name, *(f"{name}.{key}" for key, member in members if inspect.isroutine(getattr(value, key)))]
    return [name for name in found if "__" not in name]


def described(module: Any, name: str) -> Any:
    """Return the signature of a function or class, "" for any other object, None for an absent one."""
    found = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except (AttributeError, ImportError):
            return None
    return signature(found) if isinstance(found, type) or inspect.isroutine(found) else ""


def fields_of(cls: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with their defaults."""
    found = {}
    for field in dataclasses.fields(cls):
        made = field.default_factory() if callable(field.default_factory) else field.default
        found[field.name] = MISSING if made is dataclasses.MISSING else plain(made)
    return found


def values_of(config: Any) -> dict[str, Any]:
    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def tables(package: str) -> dict[str, Any]:
    """Return the number formats and the overlapped communication."""
    precision = importlib.import_module(f"{package}.training.mixed_precision")
    overlap = importlib.import_module(f"{package}.training.comm_overlap")
    return {
        "precision": fields_of(precision.MixedPrecisionConfig),
        "recipes": {name: values_of(make()) for name, make in precision.MIXED_PRECISION_RECIPES.items()},
        "overlap": fields_of(overlap.CommOverlapConfig),
        "presets": {
            name: {slot: each and plain(vars(each)) for slot, each in vars(getattr(overlap, name)).items()}
            for name in vars(overlap)
            if name.startswith("userbuffers_")
        },
    }


def main(package: str, *launcher: str) -> None:
    """Answer the request on stdin."""
    answer, sys.stdout = sys.stdout, sys.stderr
    if launcher:
        load_packages(Path(*launcher))
    else:
        load_core()
    names = {}
    for module, wanted in json.load(sys.stdin).items():
        try:
            loaded = importlib.import_module(f"{package}.{module}")
        except ModuleNotFoundError:
            names[module] = dict.fromkeys(wanted or ())
        else:
            names[module] = {name: described(loaded, name) for name in wanted or defined_in(loaded)}
    print(json.dumps({"names": names, **tables(package)}), file=answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
