"""Megatron-Bridge's launcher by release: where it lies, and the options and values that it takes.

An installed clone says so itself. Without one, shipped data do, for the releases that they describe; the launcher of
any other release is not known, and its options are not checked.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from cloudai_mbridge.megatron_bridge.launcher.argument_parser import Option, read_options
from cloudai_mbridge.megatron_bridge.release import Release

_OF = "releases"


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
    return tuple(
        LauncherOptions(version, facts["path"], _options_of(version, data["options"]))
        for version, facts in data["launcher"].items()
    )


def _options_of(version: str, table: Iterable[Mapping[str, Any]]) -> dict[str, Option]:
    found = [_option_of(row) for row in table if version in row[_OF]]
    return {option.name: option for option in found}


def _option_of(row: Mapping[str, Any]) -> Option:
    values: dict[str, Any] = {key: value for key, value in row.items() if key != _OF}
    values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return Option(**values)


def find_launcher(release: Release | None) -> LauncherOptions | None:
    """Return the launcher of a release: as its installed clone has it, else as shipped; None where it is not known."""
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
    """Read an installed launcher where a known one lies."""
    launcher = _shipped(version) or known_launchers()[-1]
    options = read_options((clone / launcher.path).with_name("argument_parser.py"))
    return LauncherOptions(version, launcher.path, options) if options else None


def problems_of(argv: Sequence[str], launcher: LauncherOptions) -> Iterator[tuple[str, str]]:
    """Yield (flag, what is wrong with it) for every flag or value that the launcher would refuse or pass over.

    argv: each flag alone or as flag=value; values that look like a flag do not stand alone.
    """
    for i, element in enumerate(argv):
        flag, joined, value = element.partition("=")
        if not _is_flag(flag):
            continue
        option = launcher.option(flag)
        if option is None:
            yield flag, f"the launcher of Megatron-Bridge {launcher.version} has no such option; {_remedy(flag)}"
            continue
        if not joined and i + 1 < len(argv) and not _is_flag(argv[i + 1]):
            value = argv[i + 1]
        if option.choices and not option.action and _as_read(value, option) not in option.choices:
            yield (
                flag,
                f"{value!r} is unknown to the launcher of Megatron-Bridge {launcher.version};"
                f" use one of {', '.join(option.choices)}{_or_release(flag, value)}",
            )


def _is_flag(text: str) -> bool:
    return len(text) > 1 and text[0] == "-" and not (text[1].isdigit() or text[1] == ".")


def _as_read(value: str, option: Option) -> str:
    return value.lower() if option.type == "lower_str" else value


def _remedy(flag: str) -> str:
    having = [known.version for known in known_launchers() if known.option(flag)]
    return f"remove it, or pin a release that has it: {_releases(having)}" if having else "remove it"


def _or_release(flag: str, value: str) -> str:
    having = [
        known.version
        for known in known_launchers()
        if (option := known.option(flag)) and _as_read(value, option) in option.choices
    ]
    return f"; or pin a release that knows it: {_releases(having)}" if having else ""


def _releases(versions: list[str]) -> str:
    every = [known.version for known in known_launchers()]
    first = every.index(versions[0])
    return f"{versions[0]} or later" if every[first:] == versions else ", ".join(versions)
