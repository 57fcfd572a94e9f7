"""The types of config fields as data, config classes as tables of fields. Standard library only."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SIMPLE = ("any", "none", "bool", "int", "float", "str", "path", "dtype", "callable")
_NAMES = dict(zip(SIMPLE, ("Any", "None", "bool", "int", "float", "str", "Path", "dtype", "Callable"), strict=True))
_KINDS = {text: kind for kind, text in _NAMES.items()}
_NAMED = {"config": "Config", "enum": "Enum", "opaque": "Opaque"}
_GENERIC = ("list", "tuple", "dict")


@dataclass(frozen=True)
class Form:
    """One type.

    `args` holds the member forms of a union, list, tuple or dict, the choices of a literal, or the class path of a
    config class, an enum or an opaque object (not describable in a file). A tuple of any length has kind
    "tuple" and `open_ended`.
    """

    kind: str
    args: tuple[Any, ...] = ()
    open_ended: bool = False


ANY = Form("any")
NONE = Form("none")


def union(options: tuple[Form, ...]) -> Form:
    """Join `options`, flattened and without repetitions; any swallows the rest."""
    flat: list[Form] = []
    for option in options:
        flat.extend(option.args if option.kind == "union" else (option,))
    unique = tuple(dict.fromkeys(flat))
    if ANY in unique:
        return ANY
    return unique[0] if len(unique) == 1 else Form("union", unique)


def options_of(form: Form, *kinds: str) -> tuple[Form, ...]:
    """List the members of a union, or the form itself; if `kinds` are given, only members of these kinds."""
    options = form.args if form.kind == "union" else (form,)
    return tuple(option for option in options if option.kind in kinds) if kinds else options


def render(form: Form) -> str:
    """Write `form` as the type text of the schema, in Python's own notation."""
    if form.kind in _NAMES:
        return _NAMES[form.kind]
    if form.kind == "union":
        return " | ".join(render(option) for option in form.args)
    if form.kind == "literal":
        return f"Literal[{', '.join(repr(choice) for choice in form.args)}]"
    if form.kind in _NAMED:
        return f"{_NAMED[form.kind]}[{form.args[0]!r}]"
    members = [render(member) for member in form.args] + (["..."] if form.open_ended else [])
    return f"{form.kind}[{', '.join(members) or '()'}]"


def describe(form: Form) -> str:
    """Write `form` for a reader of an error message: class paths are cut to the class name."""
    if form.kind in _NAMED:
        return str(form.args[0]).rpartition(".")[2]
    if form.kind == "union":
        return " | ".join(describe(option) for option in form.args)
    if form.kind in _GENERIC:
        members = [describe(member) for member in form.args] + (["..."] if form.open_ended else [])
        return f"{form.kind}[{', '.join(members)}]"
    return render(form)


def parse(text: str) -> Form:
    """Parse the output of `render`. Raises ValueError: not a type text."""
    try:
        return _from_node(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not the text of a type") from error


def _from_node(node: ast.expr) -> Form:
    if isinstance(node, ast.BinOp):
        return union((_from_node(node.left), _from_node(node.right)))
    if isinstance(node, ast.Constant) and node.value is None:
        return NONE
    if isinstance(node, ast.Name) and node.id in _KINDS:
        return Form(_KINDS[node.id])
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return _from_subscript(node.value.id, node.slice)
    raise ValueError(f"{ast.dump(node)} is not the text of a type")


def _from_subscript(name: str, inner: ast.expr) -> Form:
    items = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
    if name == "Literal":
        return Form("literal", tuple(ast.literal_eval(item) for item in items))
    for kind, text in _NAMED.items():
        if name == text:
            return Form(kind, (ast.literal_eval(items[0]),))
    if name not in _GENERIC:
        raise ValueError(f"{name} is not the text of a type")
    open_ended = bool(items) and isinstance(items[-1], ast.Constant) and items[-1].value is Ellipsis
    return Form(name, tuple(_from_node(item) for item in (items[:-1] if open_ended else items)), open_ended)


@dataclass(frozen=True)
class Field:
    """One key of a config class."""

    form: Form
    required: bool = False
    computed: bool = False


@dataclass(frozen=True)
class Section:
    """One config class: its path, its fields, second names of fields, and the paths of its base classes."""

    path: str
    fields: Mapping[str, Field]
    aliases: Mapping[str, str] = field(default_factory=dict)
    bases: tuple[str, ...] = ()
    abstract: bool = False

    def keys(self) -> list[str]:
        """List the names that may be set."""
        return [*(name for name, entry in self.fields.items() if not entry.computed), *self.aliases]


def field_key(section: Section, key: object) -> str | None:
    """Return the name of the field that `key` sets, None if missing."""
    if not isinstance(key, str):
        return None
    name = section.aliases.get(key, key)
    return name if name in section.fields else None
