"""Check plain data against the forms of config fields: the loader of config files and the planner both end here.

Standard library only: programs without torch look classes and enums up in `schema.json`.
"""

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from cloudai_mbridge.training.errors import ConfigError, fail, join, nearest, show
from cloudai_mbridge.training.schema.foreign import as_meant, translate_provider
from cloudai_mbridge.training.schema.forms import (
    ANY,
    Form,
    Section,
    describe,
    load_schema,
    options_of,
    read_section,
    variants_of,
    why_missing,
)
from cloudai_mbridge.training.schema.known_names import (
    ACTIVATIONS,
    CLASS_PATHS,
    CONTAINER,
    DTYPES,
    ENUMS,
    FUNCTIONS,
    LATER_VALUES,
    PARTIAL_PREFIX,
    dtype_name,
    is_foreign,
    kind_of_target,
)
from cloudai_mbridge.training.schema.not_done import ASKS_FOR_NOTHING, WITHOUT_EFFECT, remedy

MAX_DEPTH = 64
_PLAIN_TYPES: Mapping[str, type] = {"bool": bool, "int": int, "str": str}
# Types that take a value without a conversion
_EXACT = ("none", "bool", "int", "str", "literal")
_KEY = Form("union", (Form("str"), Form("int"), Form("bool")))
_ENUM_KEYS = ("_target_", "_args_", "_call_", "_name_")


def check_section_values(data: dict[str, Any], *, partial: bool = False, release: str | None = None) -> None:
    """Check a config given as plain data, section -> key -> value, as strictly as the training process will.

    partial: keys and sections may be missing, as in the overlay of a recipe.
    release: of the Megatron-Core that will train; None if unknown: keys of any release pass.

    ConfigError: unknown or missing key, or a wrong type: dotted path, value, and the valid or nearest key.
    """
    if not isinstance(data, dict):
        fail("", f"a table of sections is needed, got {show(data)}")
    check(Form("config", (CONTAINER,)), data, "", Catalog(release, partial=partial))


class Catalog:
    """Lookup of classes and enums by their paths, in the schema.

    release: of the Megatron-Core that trains, or its version; None: unknown.
    partial: no key is required.
    dropped: keys of tables that Megatron-Bridge wrote and no class here has, with their values.
    """

    def __init__(self, release: str | None, *, partial: bool = False) -> None:
        self.release = release
        self.partial = partial
        self.dropped: dict[str, Any] = {}

    def section(self, path: str) -> Section | None:
        """Return the config class at `path`, None if missing."""
        return read_section(path, self.release) if path in load_schema(self.release)["classes"] else None

    def members(self, path: str) -> Mapping[str, Any]:
        """Return name -> value of the enum at `path`."""
        members: Mapping[str, Any] = load_schema(self.release)["enums"].get(path, {})
        return members

    def make(self, form: Form, value: Any, where: str) -> Any:
        """Return the object of the checked `value`, here the value; items of lists and tables are made already."""
        return value


def is_tagged(value: object) -> bool:
    """Return whether `value` is a table with a `_target_`."""
    return isinstance(value, dict) and "_target_" in value


def check(form: Form, value: Any, where: str, catalog: Catalog, depth: int = 0) -> Any:
    """Check `value` against `form`, and return the catalog's object for it; `where` is its dotted path.

    ConfigError: unknown key, missing key, wrong type, or a `_target_` outside the known names.
    """
    if depth > MAX_DEPTH:
        fail(where, f"nested deeper than {MAX_DEPTH} levels")
    if is_tagged(value):  # nothing has been imported yet
        _check_target(value["_target_"], form, where)
    candidates = _fitting(form, value, catalog)
    if len(candidates) == 1:
        return _CHECKS[candidates[0].kind](candidates[0], value, where, catalog, depth)
    for option in candidates:
        with suppress(ConfigError):
            return check(option, value, where, catalog, depth)
    _fail_type(form, value, where, catalog)


def _fitting(form: Form, value: Any, catalog: Catalog) -> list[Form]:
    """List the options of `form` that `value` may be meant as, by its outer shape, exact types first.

    A table without `_target_` is meant as the first class; one with it is read as that class, whatever the option.
    """
    options = [option for option in options_of(form) if _shape_fits(option, value, catalog)]
    configs = [option for option in options if option.kind == "config"]
    options = [option for option in options if option not in configs[1:]]
    return sorted(options, key=lambda option: option.kind not in _EXACT)


def _check_target(target: object, form: Form, where: str) -> None:
    """Refuse a `_target_` that neither the tables nor the annotation names."""
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
        target = value["_target_"]
        if kind in ("config", "enum") and target == form.args[0]:
            return True
        if kind != "config" or kind_of_target(target) != kind:
            return kind_of_target(target) == kind
        section = catalog.section(path := CLASS_PATHS[target])
        return path == form.args[0] or (section is not None and form.args[0] in section.bases)
    if isinstance(value, dict):
        return kind in ("dict", "config")
    if isinstance(value, list):
        return kind in ("list", "tuple")
    return kind not in ("dict", "config", "list", "tuple") and _scalar_fits(form, value, catalog)


def _scalar_fits(form: Form, value: Any, catalog: Catalog) -> bool:
    kind = form.kind
    if kind == "none":
        return value is None
    if kind in _PLAIN_TYPES:
        return type(value) is _PLAIN_TYPES[kind]  # the type itself: True is not an int here
    if kind == "float":
        return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
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


def _fail_type(form: Form, value: Any, where: str, catalog: Catalog) -> NoReturn:
    if type(value) is str and value in LATER_VALUES:
        fail(where, f"{show(value)} needs a Megatron-Core {LATER_VALUES[value]}, which is not supported yet")
    name = "null" if value is None else "table" if isinstance(value, dict) else type(value).__name__
    article = "" if value is None else "an " if name[0] in "aeiou" else "a "
    text = f"{show(value)} is {article}{name}, {describe(form)} is needed"
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


def _hint_for_text(value: str, kinds: set[str]) -> str:
    if "bool" in kinds and value.lower() in ("yes", "no", "on", "off", "true", "false"):
        return "; write true or false"
    if kinds & {"int", "float"} and re.fullmatch(r"[-+]?[\d_.,]+([eE][-+]?\d+)?", value):
        return "; write a plain number without quotes, underscores and leading zeros"
    return "; it is an object of the program, a file cannot give it" if "opaque" in kinds else ""


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
    items = list(_one_argument(value, where, list) if is_tagged(value) else value)
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
        tagged = Form("tuple", (ANY,), True) if kind == "tuple" else Form(kind, (path,))
        return _CHECKS[kind](tagged, value, where, catalog, depth)
    if isinstance(value, list):
        return _check_list(Form("list", (ANY,)), value, where, catalog, depth)
    if isinstance(value, dict):
        return _check_dict(Form("dict", (_KEY, ANY)), value, where, catalog, depth)
    if value is not None and type(value) not in (bool, int, float, str):
        fail(where, f"{show(value)} is not plain data")
    return value


def _check_config(form: Form, value: Any, where: str, catalog: Catalog, depth: int) -> Any:
    path = value.get("_target_", form.args[0])
    if path != form.args[0]:
        path = CLASS_PATHS.get(path, path)
    section = catalog.section(path)
    if section is None or section.abstract:
        if "_target_" not in value:
            fail(where, f"name the class in `_target_`: {describe(form)} is only a base class")
        fail(join(where, "_target_"), f"{show(value.get('_target_'))} is not a class that can be built here")
    made = _check_keys(section, translate_provider(value, section, where), where, catalog, depth)
    missing = [name for name in section.required if name not in made]
    if missing and not catalog.partial:
        fail(where, f"missing key{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {describe(form)}")
    return catalog.make(Form("config", (path,)), made, where)


def _check_keys(section: Section, value: Mapping[Any, Any], where: str, catalog: Catalog, depth: int) -> dict[str, Any]:
    """Check every key of a table; return field -> the object of its value."""
    given: dict[str, Any] = {}
    made: dict[str, Any] = {}
    foreign = is_foreign(str(value.get("_target_", "")))
    for key, item in value.items():
        at, name = join(where, key), section.field_of(key)
        if key == "_call_" and item is not True:
            fail(at, f"{show(item)}: a config class is always built, leave _call_ out")
        if key in ("_target_", "_call_"):
            continue
        if foreign and isinstance(key, str) and _is_left_out(section, value, key, catalog):
            _refuse_request(section, value, key, at, catalog)
            catalog.dropped[at] = item
            continue
        if name is None:
            cls = section.path.rpartition(".")[2]
            hint = nearest(key, section.keys(), f"valid keys of {cls}") if section.fields else f"{cls} has no keys"
            hint += "" if is_tagged(value) else f" (read as {cls}: `_target_` is missing)"
            fail(at, why_missing(section.path, str(key), catalog.release) or f"unknown key; {hint}")
        if name in section.computed:
            if not foreign:  # tables of Megatron-Bridge may carry them
                fail(at, "is computed, it cannot be set")
            continue
        item = as_meant(section.path, name, item) if foreign else item
        made[name] = check(section.fields[name], item, at, catalog, depth + 1)
        if name in given and not (given[name] == item or (given[name] != given[name] and item != item)):  # two NaN
            fail(at, f"{show(item)} contradicts {show(given[name])}, given under its other name")
        given[name] = item
    return made


def _is_left_out(section: Section, table: Mapping[Any, Any], key: str, catalog: Catalog) -> bool:
    """Return whether to ignore a key of a table that Megatron-Bridge or Megatron-Core wrote.

    Other releases of Megatron-Core have fields that do not exist here. Megatron-Bridge has fields of its own, and null
    in fields that require a value here.
    """
    name = section.field_of(key)
    if str(table["_target_"]).startswith("megatron.core."):  # it has only keys of some release of Megatron-Core
        return name is None and why_missing(section.path, key, catalog.release) is not None
    return name is None or (table[key] is None and not _fitting(section.fields[name], None, catalog))


def _refuse_request(section: Section, table: Mapping[Any, Any], key: str, where: str, catalog: Catalog) -> None:
    """Refuse to ignore a key that has an effect: other than the default of every release that has it."""
    item = table[key]
    decides, off = WITHOUT_EFFECT.get(where, ("", None))
    if item is None or (decides and (item == [] or table.get(decides, off) == off)):
        return
    if (row := ASKS_FOR_NOTHING.get(where)) is not None:
        if item not in row[1]:
            fail(where, f"the training loop does not do {show(item)}; {remedy(row)}")
        return
    variants = variants_of(section.path, key)
    if variants and item not in [variant["default"] for variant in variants if "default" in variant]:
        fail(where, f"{show(item)} {why_missing(section.path, key, catalog.release)}")


def _check_leaf(form: Form, value: Any, where: str, catalog: Catalog, depth: int) -> Any:
    """Accept a value checked by `_shape_fits`, or check the object that a table names."""
    if is_tagged(value):
        match form.kind:
            case "dtype" | "callable":
                _check_reference(value, where)
            case "path":
                _one_argument(value, where, str)
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


def _one_argument(value: Mapping[str, Any], where: str, kind: type) -> Any:
    """Return the only positional argument of a tagged table."""
    if extra := [key for key in value if key not in _ENUM_KEYS]:
        fail(join(where, extra[0]), f"unknown key beside _target_ {value['_target_']}")
    arguments = value.get("_args_")
    if not isinstance(arguments, list) or len(arguments) != 1 or type(arguments[0]) is not kind:
        fail(join(where, "_args_"), f"{show(arguments)}: a list of one {kind.__name__} is needed")
    return arguments[0]


def _check_reference(value: Mapping[Any, Any], where: str) -> None:
    """Check the table of a dtype or a function: named, never called; an initializer may have numbers."""
    target = value["_target_"]
    if value.get("_partial_") is not True:
        for key, item in value.items():
            if key != "_target_" and not (key in ("_call_", "_partial_") and item is False):
                fail(join(where, key), f"{show(item)}: {target} is named here, never called")
        return
    if not target.startswith(PARTIAL_PREFIX):
        fail(where, f"{target} takes no arguments; only functions of {PARTIAL_PREFIX}* do")
    arguments = value.get("_args_", [])
    if not isinstance(arguments, list):
        fail(join(where, "_args_"), f"{show(arguments)} is not a list")
    numbers = [(f"_args_[{index}]", item) for index, item in enumerate(arguments)]
    numbers += [(key, item) for key, item in value.items() if key not in ("_target_", "_partial_", "_args_")]
    for key, item in numbers:
        if not isinstance(key, str) or type(item) not in (int, float, str) or key == "_call_":
            fail(join(where, key), f"{show(item)}: only numbers and names can be filled in")


def enum_member(form: Form, value: Any, where: str, catalog: Catalog) -> str:
    """Return the member name that a text or a tagged table stands for."""
    if not is_tagged(value):
        return str(value)
    path = form.args[0]
    if value["_target_"] != path:
        fail(join(where, "_target_"), f"{show(value['_target_'])}, {describe(form)} is needed")
    if [key for key in value if key not in _ENUM_KEYS] or value.get("_call_", True) is not True:
        fail(where, f"an enum member is written with _name_ or _args_ beside _target_, got {show(value)}")
    members, named, arguments = catalog.members(path), value.get("_name_"), value.get("_args_")
    wanted = [(type(each), each) for each in arguments] if isinstance(arguments, list) else arguments
    matching = [
        name
        for name, member in members.items()
        if named in (None, name) and (wanted is None or wanted == [(type(member), member)])
    ]
    if (named is None and arguments is None) or not matching:
        given = arguments if named is None else named
        fail(where, f"{show(given)} is not a {describe(form)}; {nearest(given, members, 'choices')}")
    return matching[0]
