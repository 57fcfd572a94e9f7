"""What a point's `extra_cmd_args` say of the model: every `model.*` key that the formulas read, by its type."""

from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_origin

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.recipes.apply import MAPPED, parse_value

_MODEL = "model."
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NONE = ("null", "none")
# what decides about the layout has to be an argument, where layout and rules see it
_ARGUMENTS = ("tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length", "pipeline_model_parallel_layout")
_ARGUMENT_OF = {".".join(MAPPED[argument]): argument for argument in (*_ARGUMENTS, "compute_dtype")}


def model_overrides(extra: Mapping[str, str], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the model that `extra` sets. types: of the fields that there are.

    BadInput: a value has the wrong type, or belongs into `cmd_args`, where the layout reads it.
    """
    given: dict[str, Any] = {}
    for key, text in extra.items():
        name = key.lstrip("+")
        if argument := _ARGUMENT_OF.get(name):
            raise BadInput(f"extra_cmd_args: {key!r} is cmd_args.{argument}; set it there")
        if name.startswith(_MODEL) and (field := name.removeprefix(_MODEL)) in types:
            given[field] = _read(key, text, types[field])
    return given


def _read(key: str, text: str, wanted: Any) -> Any:
    kinds = set(get_args(wanted)) if isinstance(wanted, UnionType) else {wanted}
    value: Any = parse_value(text)
    if isinstance(value, str) and value.lower() in _NONE and type(None) in kinds:
        return None
    if isinstance(value, str) and value.lower() in _BOOLEANS and bool in kinds:
        return _BOOLEANS[value.lower()]
    if isinstance(value, list) and all(_is(int, entry) for entry in value) and any(map(get_origin, kinds)):
        return tuple(value)
    for kind in (kind for kind in kinds if isinstance(kind, type)):
        if _is(kind, value) or (kind is float and _is(int, value)):
            return value
    raise BadInput(f"extra_cmd_args: {key!r}: {text!r} is not {' or '.join(sorted(map(_name, kinds)))}; correct it")


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _name(kind: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return names.get(kind, "a list of whole numbers")
