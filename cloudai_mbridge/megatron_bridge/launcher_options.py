"""Megatron-Bridge's launcher by release: its path, and the options and values that it accepts.

The source is the argument parser of an installed clone, which is read without running it, else the shipped data; the
launcher of any other release is unknown, and its options are not checked.
"""

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from cloudai_mbridge.megatron_bridge.release import Release


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
    constants: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with suppress(ValueError):
                constants[node.targets[0].id] = ast.literal_eval(node.value)
    options = (_option(node, constants) for node in ast.walk(tree) if _is_call_of(node, "add_argument"))
    return {option.name: option for option in options if option}


def _is_call_of(node: ast.AST, method: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method


def _option(node: ast.AST, constants: Mapping[str, Any]) -> Option | None:
    assert isinstance(node, ast.Call)
    flags = tuple(str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))
    if not flags or not flags[0].startswith("-"):
        return None
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    kind, default = given.get("type"), _value(given.get("default"), constants)
    return Option(
        flags=flags,
        type="lambda" if isinstance(kind, ast.Lambda) else ast.unparse(kind) if kind else "",
        action=str(_value(given.get("action"), constants) or ""),
        choices=tuple(str(value) for value in _value(given.get("choices"), constants) or ()),
        default=None if default is None else str(default),
    )


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


@dataclass(frozen=True)
class LauncherOptions:
    """A release's launcher.

    version: the release, such as 0.3.0. path: of the launcher, in the repository.
    """

    version: str
    path: str
    options: Mapping[str, Option]

    def option(self, flag: str) -> Option | None:
        """Return the option that has this flag."""
        return next((option for option in self.options.values() if flag in option.flags), None)


@cache
def known_launchers() -> tuple[LauncherOptions, ...]:
    """Return the launchers that the shipped data describe, oldest first."""
    text = (files("cloudai_mbridge.megatron_bridge") / "data" / "launchers.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    launchers = []
    for version, facts in data["launcher"].items():
        options = {}
        for row in data["options"]:
            if version in row["releases"]:
                given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
                del given["releases"]
                option = Option(**given)
                options[option.name] = option
        launchers.append(LauncherOptions(version, facts["path"], options))
    return tuple(launchers)


def find_launcher(release: Release | None) -> LauncherOptions | None:
    """Return the launcher of a release, from its installed clone, else from the shipped data; None if unknown."""
    if release is None:
        return None
    return (release.clone and _read(release.clone, release.version)) or _shipped(release.version)


def _shipped(version: str) -> LauncherOptions | None:
    """Return the shipped launcher of a release, or of the newest with its major and minor version."""
    minor = version.rpartition(".")[0]
    of_minor = [known for known in known_launchers() if known.version.rpartition(".")[0] == minor]
    return next((known for known in of_minor if known.version == version), of_minor[-1] if of_minor else None)


@cache
def _read(clone: Path, version: str) -> LauncherOptions | None:
    """Read an installed launcher at the path of a known launcher."""
    launcher = _shipped(version) or known_launchers()[-1]
    options = read_options((clone / launcher.path).with_name("argument_parser.py"))
    return LauncherOptions(version, launcher.path, options) if options else None


def problems_of(argv: Sequence[str], launcher: LauncherOptions) -> Iterator[tuple[str, str]]:
    """Yield (flag, problem) for every flag or value that the launcher would reject or ignore.

    argv: each flag alone or as flag=value; values that look like a flag do not stand alone.
    """
    for i, element in enumerate(argv):
        flag, joined, value = element.partition("=")
        if not _is_flag(flag):
            continue
        option = launcher.option(flag)
        if option is None:
            having = _releases_with(flag)
            remedy = f"remove it, or pin a release that has it: {having}" if having else "remove it"
            yield flag, f"the launcher of Megatron-Bridge {launcher.version} has no such option; {remedy}"
            continue
        if not joined and i + 1 < len(argv) and not _is_flag(argv[i + 1]):
            value = argv[i + 1]
        if option.choices and not option.action and not option.takes(value):
            having = _releases_with(flag, value)
            remedy = f"use one of {', '.join(option.choices)}"
            remedy += f"; or pin a release that knows it: {having}" if having else ""
            yield flag, f"{value!r} is unknown to the launcher of Megatron-Bridge {launcher.version}; {remedy}"


def _is_flag(text: str) -> bool:
    return len(text) > 1 and text[0] == "-" and not (text[1].isdigit() or text[1] == ".")


def _releases_with(flag: str, value: str | None = None) -> str:
    """Return the releases that have an option, or have it with this value; "" without any."""
    found = {known.version: known.option(flag) for known in known_launchers()}
    having = [version for version, option in found.items() if option and (value is None or option.takes(value))]
    is_rest = having and list(found)[-len(having) :] == having
    return f"{having[0]} or later" if is_rest else ", ".join(having)
