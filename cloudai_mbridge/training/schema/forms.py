"""The types of config fields as data, config classes as tables of fields, and `schema.json`, which has those of several
releases of Megatron-Core: an entry that is the same in all is stored once, any other as a list of entries, each with
its "releases". Standard library only."""

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cloudai_mbridge.training.compat.versions import RELEASES

_NAMES = {"any": "Any", "none": "None", "path": "Path", "callable": "Callable"}
_NAMES |= {name: name for name in ("bool", "int", "float", "str", "dtype")}
_KINDS = {text: kind for kind, text in _NAMES.items()}
_NAMED = {"config": "Config", "enum": "Enum", "opaque": "Opaque"}
_NAMED_KINDS = {text: kind for kind, text in _NAMED.items()}

SCHEMA_FILE = Path(__file__).with_name("schema.json")
RELEASES_KEY = "releases"


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


def render(form: Form, *, short: bool = False) -> str:
    """Write `form` as the type text of the schema, in Python's own notation. short: class names without their paths."""
    if form.kind in _NAMES:
        return _NAMES[form.kind]
    if form.kind == "literal":
        return f"Literal[{', '.join(repr(choice) for choice in form.args)}]"
    if form.kind in _NAMED:
        return str(form.args[0]).rpartition(".")[2] if short else f"{_NAMED[form.kind]}[{form.args[0]!r}]"
    members = [render(member, short=short) for member in form.args]
    if form.kind == "union":
        return " | ".join(members)
    return f"{form.kind}[{', '.join([*members, '...'] if form.open_ended else members) or '()'}]"


def describe(form: Form) -> str:
    """Write `form` for a reader of an error message."""
    return render(form, short=True)


def parse(text: str) -> Form:
    """Parse the output of `render`. Raises ValueError: not a type text."""
    try:
        return _from_node(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not the text of a type") from error


def _from_node(node: ast.expr) -> Form:
    match node:
        case ast.BinOp():
            return union((_from_node(node.left), _from_node(node.right)))
        case ast.Constant(value=None):
            return NONE
        case ast.Name(id=name) if name in _KINDS:
            return Form(_KINDS[name])
        case ast.Subscript(value=ast.Name(id=name), slice=inner):
            items = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
            if name == "Literal":
                return Form("literal", tuple(ast.literal_eval(item) for item in items))
            if name in _NAMED_KINDS:
                return Form(_NAMED_KINDS[name], (ast.literal_eval(items[0]),))
            if name in ("list", "tuple", "dict"):
                open_ended = bool(items) and isinstance(items[-1], ast.Constant) and items[-1].value is Ellipsis
                members = items[:-1] if open_ended else items
                return Form(name, tuple(_from_node(member) for member in members), open_ended)
    raise ValueError(f"{ast.dump(node)} is not the text of a type")


@dataclass(frozen=True)
class Section:
    """One config class: its path, its fields, second names of fields, and the paths of its base classes."""

    path: str
    fields: Mapping[str, Form]
    required: tuple[str, ...]
    computed: tuple[str, ...]
    aliases: Mapping[str, str]
    bases: tuple[str, ...]
    abstract: bool

    def keys(self) -> list[str]:
        """List the names that may be set."""
        return [*(name for name in self.fields if name not in self.computed), *self.aliases]

    def field_of(self, key: object) -> str | None:
        """Return the name of the field that `key` sets, None if missing."""
        name = self.aliases.get(key, key) if isinstance(key, str) else None
        return name if name in self.fields else None


@cache
def load_all_releases() -> dict[str, Any]:
    """Return the content of `schema.json`."""
    return dict(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))


@cache
def load_schema(release: str | None = None) -> dict[str, Any]:
    """Return the schema: `root` (path of the container), `classes` (path -> fields) and `enums` (path -> members).

    release: of Megatron-Core, such as "0.19"; None: every key, and every value, of any release.
    """
    schema = load_all_releases()
    classes = {
        path: {**entry, "fields": _chosen(entry["fields"], release)} for path, entry in schema["classes"].items()
    }
    return {**schema, "classes": classes, "enums": _chosen(schema["enums"], release)}


def _chosen(table: Mapping[str, Any], release: str | None) -> dict[str, Any]:
    found = {}
    for key, entry in table.items():
        if not isinstance(entry, list):
            found[key] = entry
        elif release is None:
            found[key] = _of_any(entry)
        elif fitting := [variant for variant in entry if release in variant[RELEASES_KEY]]:
            found[key] = without_releases(fitting[-1])
    return found


def without_releases(variant: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry as it is in each of its releases."""
    return {key: value for key, value in variant.items() if key != RELEASES_KEY}


def _of_any(variants: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a field that accepts values of any release, with the newest default; or the members of all releases."""
    joined = {key: value for variant in variants for key, value in without_releases(variant).items()}
    if "type" not in joined:  # an enum
        return joined
    options = [option for variant in variants for option in options_of(parse(variant["type"]))]
    values = tuple(dict.fromkeys(value for option in options if option.kind == "literal" for value in option.args))
    forms = tuple(option for option in options if option.kind != "literal")
    joined["type"] = render(union((Form("literal", values), *forms) if values else forms))
    joined["required"] = all(variant["required"] for variant in variants)
    if "choices" in joined:
        joined["choices"] = list(dict.fromkeys(each for variant in variants for each in variant.get("choices", ())))
    return joined


@cache
def read_section(path: str, release: str | None) -> Section:
    """Return the class at `path`, which the schema of the release has."""
    entry = load_schema(release)["classes"][path]
    fields = entry["fields"]
    return Section(
        path,
        {name: parse(each["type"]) for name, each in fields.items()},
        required=tuple(name for name, each in fields.items() if each["required"]),
        computed=tuple(name for name, each in fields.items() if each.get("computed")),
        aliases=entry["aliases"],
        bases=tuple(entry["bases"]),
        abstract=entry["abstract"],
    )


def variants_of(path: str, key: str) -> list[dict[str, Any]]:
    """Return the entries of a field that some releases lack, or have otherwise; [] for any other."""
    entry = load_all_releases()["classes"].get(path, {}).get("fields", {}).get(key)
    return entry if isinstance(entry, list) else []


def releases_of(path: str, key: str) -> str | None:
    """Describe the releases with a field that some lack, such as "0.18 or newer"; None if no release has it."""
    having = [each for each in RELEASES if any(each in variant[RELEASES_KEY] for variant in variants_of(path, key))]
    if not having:
        return None
    if having[-1] == RELEASES[-1]:
        return f"{having[0]} or newer"
    return f"{having[-1]} or older" if having[0] == RELEASES[0] else ", ".join(having)


def why_missing(path: str, key: str, used: str | None) -> str | None:
    """Describe the releases with a field that `used`, the release that trains, lacks; None if no release has it."""
    having = releases_of(path, key)
    return having and f"needs Megatron-Core {having}, and {used} trains here; remove it, or change the release"
