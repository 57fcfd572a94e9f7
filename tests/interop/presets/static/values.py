"""The values of the evaluator. Numbers, strings, lists and dicts are Python's own."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


class Unknown:
    """The value of everything that cannot be known; there is one, `UNKNOWN`."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()
NATIVE = (bool, int, float, str, list, dict, tuple, set)  # with what operators work


class Unsupported(Exception):
    """Code that the evaluator does not follow; what it could have changed is forgotten."""


class Raised(Exception):
    """An exception of the evaluated code; the text is the name of its class."""


@dataclass
class Scope:
    """Names of a module or of a call of a function; names of an outer scope are seen, not set."""

    names: dict[str, Any] = field(default_factory=dict)
    outer: "Scope | None" = None

    def holder(self, name: str) -> "Scope":
        """Return the nearest scope that has a name, or the outermost."""
        scope = self
        while name not in scope.names and scope.outer is not None:
            scope = scope.outer
        return scope

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a name, or the default where no scope has it."""
        return self.holder(name).names.get(name, default)


@dataclass(eq=False)
class Module:
    """A module of the repository that is read. `dotted` is its import name."""

    dotted: str
    is_package: bool
    scope: Scope = field(default_factory=Scope)


@dataclass(frozen=True)
class External:
    """Something outside of the repository that is read, such as torch.bfloat16."""

    dotted: str

    @property
    def name(self) -> str:
        return self.dotted.rpartition(".")[2]

    def lineage(self) -> "Iterator[External]":
        """Yield it alone: nothing is known of what it inherits from."""
        yield self


@dataclass(frozen=True)
class Import:
    """A name bound by an import that is not followed yet."""

    module: str
    name: str = ""


@dataclass(frozen=True)
class Intrinsic:
    """A function whose effect the evaluator knows."""

    call: Callable[..., Any]


@dataclass(eq=False)
class Function:
    """A function or lambda of the code, and the object that it is bound to."""

    node: ast.FunctionDef | ast.Lambda
    scope: Scope
    defaults: list[Any]
    keyword_defaults: dict[str, Any]
    bound: Any = None

    def is_decorated(self, name: str) -> bool:
        """Whether it has a decorator of this bare name."""
        decorators = getattr(self.node, "decorator_list", ())
        return any(isinstance(one, ast.Name) and one.id == name for one in decorators)


@dataclass(eq=False)
class Class:
    """A class of the code: its names, and the defaults of its fields, unevaluated."""

    name: str
    bases: list[Any]
    scope: Scope
    fields: dict[str, ast.expr | None]

    def lineage(self) -> "Iterator[Class | External]":
        """Yield the class and those that it inherits from, nearest first."""
        yield self
        for base in self.bases:
            if isinstance(base, Class | External):
                yield from base.lineage()

    def method(self, name: str) -> Any:
        """Return the method of this name, or None where no class of the repository has it."""
        of = (one.scope.names for one in self.lineage() if isinstance(one, Class))
        return next((names[name] for names in of if name in names), None)

    @property
    def is_open(self) -> bool:
        """Whether it inherits from something that is not in the repository."""
        return any(isinstance(one, External) and one.name not in _PLAIN_BASES for one in self.lineage())


_PLAIN_BASES = ("object", "ABC", "Protocol", "Enum", "Generic")


@dataclass(eq=False)
class Instance:
    """An object: the attributes that are known.

    is_open: it may have further attributes, whose values are not known.
    """

    of: Class | External | None
    attributes: dict[str, Any] = field(default_factory=dict)
    is_open: bool = True


def parts(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield the objects and collections in a value, each once, itself first."""
    seen = set() if seen is None else seen
    if not isinstance(value, Instance | list | tuple | set | dict) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    inner = value.attributes if isinstance(value, Instance) else value
    for one in inner.values() if isinstance(inner, dict) else inner:
        yield from parts(one, seen)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are known and equal."""
    if one is other or (isinstance(one, External) and one == other):
        return True
    return type(one) is type(other) and not has_unknown(one) and not has_unknown(other) and bool(one == other)


def has_unknown(value: Any) -> bool:
    """Return whether a value or a part of it is not known; of something outside, only the name is."""
    if isinstance(value, list | tuple | set):
        return any(has_unknown(item) for item in value)
    if isinstance(value, dict):
        return any(has_unknown(item) for pair in value.items() for item in pair)
    return value is UNKNOWN or isinstance(value, External)


def is_plain(value: Any) -> bool:
    """Return whether a value is one of Python's own."""
    return value is None or isinstance(value, (*NATIVE, range))


def native(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    """Call a function of Python's own; Raised if it raises what code may."""
    try:
        return function(*arguments, **keywords)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise Raised(type(error).__name__) from error
