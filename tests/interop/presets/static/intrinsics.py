"""What the evaluator knows of Python itself: built-in functions, methods of lists, dicts and strings."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.interop.presets.static.expressions import is_iterable, items_of, truth
from tests.interop.presets.static.values import (
    UNKNOWN,
    Class,
    External,
    Instance,
    Intrinsic,
    Raised,
    Unsupported,
    has_unknown,
    is_plain,
    native,
)

if TYPE_CHECKING:
    from tests.interop.presets.static.evaluate import Evaluator

# Libraries that change nothing of what they are given.
HARMLESS = ("logging", "warnings", "os", "typing", "print", "math", "json", "pathlib", "re")
_MISSING = object()


@dataclass(frozen=True)
class DataclassField:
    """What dataclasses.field returns."""

    default: Any = UNKNOWN
    factory: Any = None


def method(ev: "Evaluator", value: Any, name: str) -> Any:
    """Return a method of a list, dict or string as a function; `UNKNOWN` where it is not known here."""
    if name in _MUTATING.get(type(value), ()):
        return Intrinsic(partial(_mutation, value, name))
    return Intrinsic(partial(_pure, value, name)) if name in _PURE.get(type(value), ()) else UNKNOWN


_PURE: dict[type, tuple[str, ...]] = {
    str: (
        "lower", "upper", "strip", "lstrip", "rstrip", "split", "rsplit", "join", "replace", "startswith", "endswith",
        "removeprefix", "removesuffix", "count", "isdigit",
    ),
    list: ("count", "index", "copy"),
    tuple: ("count", "index"),
    dict: ("get", "keys", "values", "items", "copy"),
    set: ("union", "intersection", "difference", "copy"),
}  # fmt: skip
_MUTATING: dict[type, tuple[str, ...]] = {
    list: ("append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"),
    dict: ("update", "pop", "setdefault", "clear"),
    set: ("add", "update", "discard", "remove"),
}


def _pure(value: Any, name: str, ev: "Evaluator", /, *arguments: Any, **keywords: Any) -> Any:
    if has_unknown(list(arguments)) and not (name == "get" and not has_unknown(arguments[0])):
        return UNKNOWN
    return ev.seen(native(getattr(value, name), *arguments, **keywords))


def _mutation(value: Any, name: str, ev: "Evaluator", /, *arguments: Any, **keywords: Any) -> Any:
    unknown_key = isinstance(value, dict | set) and name != "update" and has_unknown(list(arguments[:1]))
    unclear = name in ("update", "extend") and not all(is_iterable(argument) for argument in arguments)
    if ev.doubt or unknown_key or unclear:
        ev.may_have_changed(value)
        return UNKNOWN
    return native(getattr(value, name), *arguments, **keywords)


def _of_known(function: Callable[..., Any], ev: "Evaluator", /, *arguments: Any, **keywords: Any) -> Any:
    """Call a built-in that needs known arguments."""
    is_known = all(map(is_plain, arguments)) and not has_unknown(list(arguments)) and not has_unknown(keywords)
    return native(function, *arguments, **keywords) if is_known else UNKNOWN


def _range(ev: "Evaluator", *arguments: Any) -> Any:
    if not all(isinstance(one, int) and abs(one) <= 100_000 for one in arguments):
        raise Unsupported("a range that is not known")
    return native(range, *arguments)


def _collected(kind: type[list[Any] | tuple[Any, ...]]) -> Intrinsic:
    return Intrinsic(lambda ev, value=(): UNKNOWN if value is UNKNOWN else kind(items_of(value)))


def _dict(ev: "Evaluator", *arguments: Any, **keywords: Any) -> Any:
    if arguments and not isinstance(arguments[0], dict):
        raise Unsupported("a dict that is not known")
    return {**(arguments[0] if arguments else {}), **keywords}


def _bool(ev: "Evaluator", value: Any = False) -> Any:
    known = truth(value)
    return UNKNOWN if known is None else known


def _getattr(ev: "Evaluator", value: Any, name: Any, default: Any = _MISSING) -> Any:
    if not isinstance(name, str) or value is UNKNOWN:
        return UNKNOWN
    try:
        return ev.attribute(value, name)
    except Raised:
        if default is _MISSING:
            raise
        return default


def _setattr(ev: "Evaluator", value: Any, name: Any, new: Any) -> None:
    if not isinstance(name, str):
        raise Unsupported("sets an attribute that is not known")
    ev.set_attribute(value, name, new)


def _hasattr(ev: "Evaluator", value: Any, name: Any) -> Any:
    """Whether an object has an attribute: not known for one from outside, until it is set."""
    if not isinstance(name, str) or isinstance(value, External):
        return UNKNOWN
    try:
        return UNKNOWN if ev.attribute(value, name) is UNKNOWN else True
    except Raised:
        return False


def _isinstance(ev: "Evaluator", value: Any, kinds: Any) -> Any:
    answers = [_is_a(value, kind) for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
    if True in answers:
        return True
    return UNKNOWN if UNKNOWN in answers else False


def _is_a(value: Any, kind: Any) -> Any:
    of_python = _TYPES.get(kind) if isinstance(kind, Intrinsic) else None
    if value is UNKNOWN or isinstance(value, External) or not (of_python or isinstance(kind, Class | External)):
        return UNKNOWN
    if of_python:
        return isinstance(value, of_python)
    if not isinstance(value, Instance):
        return False if is_plain(value) else UNKNOWN
    if isinstance(value.of, Class):
        if any(one.name == kind.name for one in value.of.lineage()):
            return True
        return UNKNOWN if value.is_open and isinstance(kind, External) else False
    return True if value.of is not None and value.of.name == kind.name else UNKNOWN


def _replace(ev: "Evaluator", value: Any, /, **changes: Any) -> Any:
    if not isinstance(value, Instance):
        return UNKNOWN
    made = Instance(value.of, {**value.attributes, **changes}, value.is_open)
    ev.finish(made)
    return made


def _copy(ev: "Evaluator", value: Any) -> Any:
    if isinstance(value, Instance):
        return Instance(value.of, dict(value.attributes), value.is_open)
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _copied(ev: "Evaluator", value: Any, made: dict[int, Any]) -> Any:
    """Return a copy in depth; `made` are the copies so far, by what they are of."""
    value = ev.seen(value)
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, Instance):
        new = made[id(value)] = Instance(value.of, {}, value.is_open)
        new.attributes.update({name: _copied(ev, one, made) for name, one in value.attributes.items()})
        return new
    if isinstance(value, dict):
        return made.setdefault(id(value), {key: _copied(ev, one, made) for key, one in value.items()})
    if isinstance(value, list | tuple | set):
        return made.setdefault(id(value), type(value)(_copied(ev, one, made) for one in value))
    return value


def _super(ev: "Evaluator", *arguments: Any) -> Any:
    raise Unsupported("super")


_KNOWN_ONLY = (set, str, int, float, len, min, max, sum, abs, any, all, sorted)
BUILTINS: dict[str, Any] = {
    **{kind.__name__: Intrinsic(partial(_of_known, kind)) for kind in _KNOWN_ONLY},
    "list": _collected(list),
    "tuple": _collected(tuple),
    "dict": Intrinsic(_dict),
    "bool": Intrinsic(_bool),
    "range": Intrinsic(_range),
    "zip": Intrinsic(lambda ev, *many, **keywords: list(zip(*map(items_of, many), strict=False))),
    "enumerate": Intrinsic(lambda ev, value, start=0: list(enumerate(items_of(value), start))),
    "getattr": Intrinsic(_getattr),
    "setattr": Intrinsic(_setattr),
    "hasattr": Intrinsic(_hasattr),
    "isinstance": Intrinsic(_isinstance),
    "super": Intrinsic(_super),
    "print": Intrinsic(lambda ev, *arguments, **keywords: None),
    "object": External("object"),
}
_TYPES = {BUILTINS[kind.__name__]: kind for kind in (list, tuple, dict, set, str, int, float, bool)}
GIVEN: dict[str, Any] = {
    "functools.wraps": Intrinsic(lambda ev, *arguments, **keywords: Intrinsic(lambda ev, function: function)),
    "dataclasses.replace": Intrinsic(_replace),
    "dataclasses.field": Intrinsic(
        lambda ev, default=UNKNOWN, default_factory=None, **others: DataclassField(default, default_factory)
    ),
    "copy.deepcopy": Intrinsic(lambda ev, value, *memo: _copied(ev, value, {})),
    "copy.copy": Intrinsic(_copy),
    "importlib.import_module": Intrinsic(
        lambda ev, name, package=None: ev.module(name) if isinstance(name, str) else UNKNOWN
    ),
    "logging.getLogger": Intrinsic(lambda ev, *arguments: External("logging")),  # what is called on it changes nothing
}
