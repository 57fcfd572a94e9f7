"""The options of a launcher, read from the source of its argument parser without running it."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Option:
    """One option of a launcher.

    flags: all its forms. type: the name of what converts its text; "" for plain text, "lambda" for an unnamed one.
    choices: the values that it takes, as written on a command line; () for any.
    """

    flags: tuple[str, ...]
    type: str = ""
    action: str = ""
    choices: tuple[str, ...] = ()
    default: str | None = None

    @property
    def name(self) -> str:
        """The long form without dashes."""
        return max(self.flags, key=len).lstrip("-")

    def takes(self, text: str) -> bool:
        """Whether a text is among the choices."""
        return (text.lower() if self.type == "lower_str" else text) in self.choices


def read_options(path: Path) -> dict[str, Option]:
    """Return every option of an argument_parser.py, by name; empty if it cannot be read."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    constants = dict(_constants(tree))
    options = (_option(node, constants) for node in ast.walk(tree) if _is_call_of(node, "add_argument"))
    return {option.name: option for option in options if option}


def _is_call_of(node: ast.AST, method: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the module's names of literals."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                yield node.targets[0].id, ast.literal_eval(node.value)
            except ValueError:
                continue


def _option(node: ast.AST, constants: Mapping[str, Any]) -> Option | None:
    assert isinstance(node, ast.Call)
    flags = tuple(str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))
    if not flags or not flags[0].startswith("-"):
        return None
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    default = _value(given.get("default"), constants)
    return Option(
        flags=flags,
        type=_name(given.get("type")),
        action=str(_value(given.get("action"), constants) or ""),
        choices=tuple(str(value) for value in _value(given.get("choices"), constants) or ()),
        default=None if default is None else str(default),
    )


def _name(node: ast.expr | None) -> str:
    if node is None:
        return ""
    return "lambda" if isinstance(node, ast.Lambda) else ast.unparse(node)


def _value(node: ast.expr | None, constants: Mapping[str, Any]) -> Any:
    """Return a literal, a named constant or its keys; None if the value is only known at run time."""
    if node is None:
        return None
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if _is_call_of(node, "keys") and isinstance(node.func.value, ast.Name):  # type: ignore[attr-defined]
        return list(constants.get(node.func.value.id, ()))  # type: ignore[attr-defined]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
