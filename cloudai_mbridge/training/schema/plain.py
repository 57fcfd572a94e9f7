"""Check plain data against the forms of config fields: the loader of config files and the planner's schema check both
end here."""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.schema.architectures import translate_provider
from cloudai_mbridge.training.schema.foreign_values import as_meant
from cloudai_mbridge.training.schema.known_names import (
    ACTIVATIONS,
    CLASS_PATHS,
    DTYPES,
    ENUMS,
    FUNCTIONS,
    LATER_VALUES,
    dtype_name,
    is_foreign,
    kind_of_target,
)
from cloudai_mbridge.training.schema.messages import fail, is_tagged, join, nearest, show
from cloudai_mbridge.training.schema.not_done import ASKS_FOR_NOTHING, WITHOUT_EFFECT, remedy
from cloudai_mbridge.training.schema.releases import Catalog
from cloudai_mbridge.training.schema.tagged import check_reference, enum_member, one_argument
from cloudai_mbridge.training.schema.type_forms import Form, Section, describe, field_key, options_of

MAX_DEPTH = 64
_PLAIN_TYPES: Mapping[str, type] = {"bool": bool, "int": int, "str": str}
# Types that take a value without a conversion
_EXACT = ("none", "bool", "int", "str", "literal")


def check(form: Form, value: Any, where: str, catalog: Catalog, depth: int = 0) -> Any:
    """Check `value` against `form`, and return the catalog's object for it; `where` is its dotted path.

    ConfigError: unknown key, missing key, wrong type, or a `_target_` outside the known names.
    """
    if depth > MAX_DEPTH:
        fail(where, f"nested deeper than {MAX_DEPTH} levels")
    if is_tagged(value):
        _check_target(value, form, where)
    candidates = fitting(form, value, catalog)
    if len(candidates) == 1:
        return _CHECKS[candidates[0].kind](candidates[0], value, where, catalog, depth)
    for option in candidates:
        with suppress(ConfigError):
            return check(option, value, where, catalog, depth)
    _fail_type(form, value, where, catalog)


def fitting(form: Form, value: Any, catalog: Catalog) -> list[Form]:
    """List the options of `form` that `value` may be meant as, by its outer shape, exact types first.

    A table without `_target_` is meant as the first class; one with it is read as that class, whatever the option.
    """
    options = [option for option in options_of(form) if _shape_fits(option, value, catalog)]
    configs = [option for option in options if option.kind == "config"]
    options = [option for option in options if option not in configs[1:]]
    return sorted(options, key=lambda option: option.kind not in _EXACT)


def _check_target(value: Mapping[str, Any], form: Form, where: str) -> None:
    """Refuse a `_target_` that neither the tables nor the annotation names; nothing has been imported yet."""
    target = value["_target_"]
    named = [option.args[0] for option in options_of(form, "config", "enum")]
    if target in named or kind_of_target(target):
        return
    valid = named or [*CLASS_PATHS, *FUNCTIONS, *DTYPES, *ENUMS]
    near = difflib.get_close_matches(str(target)[:200], valid, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"{describe(form)} is needed here"
    if str(target).startswith("megatron.bridge.models."):
        hint = f"docs/training.md lists the models of Megatron-Bridge that are; {describe(form)} is needed here"
    fail(join(where, "_target_"), f"{show(target)} is not among the classes and functions that a file may name; {hint}")


def _shape_fits(form: Form, value: Any, catalog: Catalog) -> bool:
    """Return whether `value` may match `form`, by its outer shape alone."""
    kind = form.kind
    if kind == "any":
        return True
    if is_tagged(value):
        if kind in ("config", "enum") and value["_target_"] == form.args[0]:
            return True
        target_kind = kind_of_target(value["_target_"])
        return target_kind == kind and (kind != "config" or _is_kind_of(form, value, catalog))
    if isinstance(value, dict):
        return kind in ("dict", "config")
    if isinstance(value, list):
        return kind in ("list", "tuple")
    return kind not in ("dict", "config", "list", "tuple") and _scalar_fits(form, value, catalog)


def _is_kind_of(form: Form, value: Mapping[str, Any], catalog: Catalog) -> bool:
    path = CLASS_PATHS[value["_target_"]]
    if path == form.args[0]:
        return True
    section = catalog.section(path)
    return section is not None and form.args[0] in section.bases


def _scalar_fits(form: Form, value: Any, catalog: Catalog) -> bool:
    kind = form.kind
    if kind == "none":
        return value is None
    if kind in _PLAIN_TYPES:
        return type(value) is _PLAIN_TYPES[kind]  # the type itself: True is not an int here
    if kind == "float":
        return type(value) is float or (type(value) is int and _fits_float(value))
    if kind == "literal":
        return any(type(choice) is type(value) and choice == value for choice in form.args)
    if type(value) is not str:
        return False
    if kind == "dtype":
        return dtype_name(value) in DTYPES
    if kind == "callable":
        return value in FUNCTIONS or value in ACTIVATIONS
    if kind == "enum":
        return value in catalog.members(form.args[0])
    return kind == "path"


def _fits_float(value: int) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _fail_type(form: Form, value: Any, where: str, catalog: Catalog) -> NoReturn:
    if type(value) is str and value in LATER_VALUES:
        fail(where, f"{show(value)} needs a Megatron-Core {LATER_VALUES[value]}, which is not supported yet")
    text = f"{show(value)} is {_type_name(value)}, {describe(form)} is needed"
    kinds = {option.kind for option in options_of(form)}
    if type(value) is str:
        named = spelled_out(form, catalog, dtype=DTYPES, callable=FUNCTIONS)
        choices = [choice for choice in named if isinstance(choice, str)]
        text += f"; {nearest(value, choices, 'choices')}" if choices else _hint_for_text(value, kinds)
    elif "str" in kinds and isinstance(value, int | float):
        text += "; put it in quotes to mean text"
    elif is_tagged(value) or (isinstance(value, dict) and "config" in kinds):
        text += "; `_target_` must name one of them"
    fail(where, text)


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    name = "table" if isinstance(value, dict) else type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _hint_for_text(value: str, kinds: set[str]) -> str:
    if "bool" in kinds and value.lower() in ("yes", "no", "on", "off", "true", "false"):
        return "; write true or false"
    if kinds & {"int", "float"} and re.fullmatch(r"[-+]?[\d_.,]+([eE][-+]?\d+)?", value):
        return "; write a plain number without quotes, underscores and leading zeros"
    if "opaque" in kinds:
        return "; it is an object of the program, a file cannot give it"
    return ""


def spelled_out(form: Form, catalog: Catalog, **by_kind: Iterable[str]) -> list[Any]:
    """List the choices of literals, the members of enums, and the given values of other kinds."""
    found: list[Any] = []
    for option in options_of(form):
        if option.kind == "literal":
            found.extend(option.args)
        elif option.kind == "enum":
            found.extend(catalog.members(option.args[0]))
        else:
            found.extend(by_kind.get(option.kind, ()))
    return found


def _check_list(form: Form, value: Any, where: str, catalog: Catalog, depth: int) -> Any:
    items = list(one_argument(value, where, list) if is_tagged(value) else value)
    is_fixed = form.kind == "tuple" and not form.open_ended
    if is_fixed and len(items) != len(form.args):
        fail(where, f"{show(items)} has {len(items)} items, {describe(form)} is needed")
    members = form.args if is_fixed else form.args * len(items)
    made = [
        check(member, item, f"{where}[{index}]", catalog, depth + 1)
        for index, (member, item) in enumerate(zip(members, items, strict=True))
    ]
    return catalog.make(form, made, where)


def _check_dict(form: Form, value: Any, where: str, catalog: Catalog, depth: int) -> Any:
    key_form, item_form = form.args
    made = {}
    for key, item in value.items():
        check(key_form, key, f"{join(where, key)} (key)", catalog, depth + 1)
        made[key] = check(item_form, item, join(where, key), catalog, depth + 1)
    return made


def _check_any(_: Form, value: Any, where: str, catalog: Catalog, depth: int) -> Any:
    """Check data of free form: plain scalars, lists and tables, in which tagged tables obey the known names."""
    if is_tagged(value):
        kind = kind_of_target(value["_target_"])
        path = CLASS_PATHS.get(value["_target_"], value["_target_"])
        tagged = Form("tuple", (_ANY,), True) if kind == "tuple" else Form(kind, (path,))
        return _CHECKS[kind](tagged, value, where, catalog, depth)
    if isinstance(value, list):
        return _check_list(Form("list", (_ANY,)), value, where, catalog, depth)
    if isinstance(value, dict):
        return _check_dict(Form("dict", (_KEY, _ANY)), value, where, catalog, depth)
    if value is not None and type(value) not in (bool, int, float, str):
        fail(where, f"{show(value)} is not plain data")
    return value


_ANY = Form("any")
_KEY = Form("union", (Form("str"), Form("int"), Form("bool")))


def _check_config(form: Form, value: Any, where: str, catalog: Catalog, depth: int) -> Any:
    path = value.get("_target_", form.args[0])
    if path != form.args[0]:
        path = CLASS_PATHS.get(path, path)
    section = catalog.section(path)
    if "_target_" not in value and (section is None or section.abstract):
        fail(where, f"name the class in `_target_`: {describe(form)} is only a base class")
    if section is None or section.abstract:
        fail(join(where, "_target_"), f"{show(value.get('_target_'))} is not a class that can be built here")
    made = _check_keys(section, translate_provider(value, section, where), where, catalog, depth)
    missing = [name for name, entry in section.fields.items() if entry.required and name not in made]
    if missing:
        fail(where, f"missing key{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {describe(form)}")
    return catalog.make(Form("config", (path,)), made, where)


def _check_keys(section: Section, value: Mapping[Any, Any], where: str, catalog: Catalog, depth: int) -> dict[str, Any]:
    """Check every key of a table; return field -> the object of its value."""
    given: dict[str, Any] = {}
    made: dict[str, Any] = {}
    foreign = is_foreign(str(value.get("_target_", "")))
    for key, item in value.items():
        at, name = join(where, key), field_key(section, key)
        if key == "_call_" and item is not True:
            fail(at, f"{show(item)}: a config class is always built, leave _call_ out")
        if key in ("_target_", "_call_"):
            continue
        if isinstance(key, str) and is_left_out(section, value, key, item, catalog):
            _refuse_request(section, value, key, at, catalog)
            catalog.dropped[at] = item
            continue
        if name is None:
            elsewhere = catalog.missing_because(section.path, str(key))
            fail(at, elsewhere or f"unknown key; {_valid_keys(section, value, key)}")
        entry = section.fields[name]
        if entry.computed:
            if not foreign:  # tables of Megatron-Bridge may carry them
                fail(at, "is computed, it cannot be set")
            continue
        item = as_meant(section.path, name, item) if foreign else item
        made[name] = check(entry.form, item, at, catalog, depth + 1)
        if name in given and not _same(given[name], item):
            fail(at, f"{show(item)} contradicts {show(given[name])}, given under its other name")
        given[name] = item
    return made


def is_left_out(section: Section, table: Mapping[Any, Any], key: str, item: Any, catalog: Catalog) -> bool:
    """Return whether to ignore a key of a table that Megatron-Bridge or Megatron-Core wrote.

    Other releases of Megatron-Core have fields that do not exist here. Megatron-Bridge has fields of its own, and null
    in fields that require a value here.
    """
    target, name = str(table.get("_target_", "")), field_key(section, key)
    if not is_foreign(target):
        return False
    if target.startswith("megatron.core."):  # it has no key that a release of Megatron-Core does not have
        return name is None and catalog.missing_because(section.path, key) is not None
    return name is None or (item is None and not fitting(section.fields[name].form, None, catalog))


def _refuse_request(section: Section, table: Mapping[Any, Any], key: str, where: str, catalog: Catalog) -> None:
    """Refuse to ignore a key that has an effect."""
    item = table[key]
    decides, off = WITHOUT_EFFECT.get(where, ("", None))
    if item is None or (decides and (item == [] or table.get(decides, off) == off)):
        return
    if (row := ASKS_FOR_NOTHING.get(where)) is not None:
        if item not in row[1]:
            fail(where, f"the training loop does not do {show(item)}; {remedy(row)}")
    elif catalog.is_request(section.path, key, item):
        fail(where, f"{show(item)} {catalog.missing_because(section.path, key)}")


def _valid_keys(section: Section, value: Mapping[Any, Any], key: object) -> str:
    name = section.path.rpartition(".")[2]
    hint = nearest(key, section.keys(), f"valid keys of {name}") if section.fields else f"{name} has no keys"
    return hint if is_tagged(value) else f"{hint} (read as {name}: `_target_` is missing)"


def _same(left: Any, right: Any) -> bool:
    return bool(left == right or (left != left and right != right))


def _check_leaf(form: Form, value: Any, where: str, catalog: Catalog, depth: int) -> Any:
    """Accept a value checked by `_shape_fits`, or check the object that a table names."""
    if is_tagged(value):
        match form.kind:
            case "dtype" | "callable":
                check_reference(value, where)
            case "path":
                one_argument(value, where, str)
            case "enum":
                enum_member(form, value, where, catalog)
    return catalog.make(form, value, where)


_CHECKS: Mapping[str, Callable[[Form, Any, str, Catalog, int], Any]] = {
    **dict.fromkeys((*_EXACT, "float", "dtype", "callable", "path", "enum"), _check_leaf),
    **dict.fromkeys(("list", "tuple"), _check_list),
    "any": _check_any,
    "dict": _check_dict,
    "config": _check_config,
}
