"""Check values that name something: dtypes, functions, enum members and paths, as texts or as tables with a `_target_`.

Nothing named is ever called, except that the numbers of an initialisation method may be filled in.
"""

from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.training.schema.known_names import PARTIAL_PREFIX
from cloudai_mbridge.training.schema.messages import fail, is_tagged, join, nearest, show
from cloudai_mbridge.training.schema.releases import Catalog
from cloudai_mbridge.training.schema.type_forms import Form, describe


def one_argument(value: Mapping[str, Any], where: str, kind: type) -> Any:
    """Return the only positional argument of a tagged table."""
    extra = [key for key in value if key not in ("_target_", "_args_", "_call_", "_name_")]
    if extra:
        fail(join(where, extra[0]), f"unknown key beside _target_ {value['_target_']}")
    arguments = value.get("_args_")
    if not isinstance(arguments, list) or len(arguments) != 1 or type(arguments[0]) is not kind:
        fail(join(where, "_args_"), f"{show(arguments)}: a list of one {kind.__name__} is needed")
    return arguments[0]


def check_reference(value: Mapping[Any, Any], where: str) -> None:
    """Check the table of a dtype or a function: it is named, never called."""
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
    members = catalog.members(path)
    extra = [key for key in value if key not in ("_target_", "_args_", "_call_", "_name_")]
    if extra or value.get("_call_", True) is not True:
        fail(where, f"an enum member is written with _name_ or _args_ beside _target_, got {show(value)}")
    named, arguments = value.get("_name_"), value.get("_args_")
    matching = [name for name, member in members.items() if _names_member(name, member, named, arguments)]
    if (named is None and arguments is None) or not matching:
        given = arguments if named is None else named
        fail(where, f"{show(given)} is not a {describe(form)}; {nearest(given, members, 'choices')}")
    return matching[0]


def _names_member(name: str, member: Any, named: Any, arguments: Any) -> bool:
    """Return whether both spellings, if given, mean this member."""
    if arguments is not None and not (isinstance(arguments, list) and len(arguments) == 1):
        return False
    is_value = arguments is None or (type(arguments[0]) is type(member) and arguments[0] == member)
    return named in (None, name) and is_value
