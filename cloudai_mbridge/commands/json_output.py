"""`--json`: one JSON document on standard output, for an error too (docs/scripting.md)."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import click

from cloudai_mbridge.errors import shortened

STDOUT = "-"
_WITH_A_FILE = {"gate", "compare"}  # their --json accepts a file name


@dataclass(frozen=True)
class Error:
    """What went wrong. kind: its class. messages: one per line of the text on standard error."""

    kind: str
    exit_code: int
    messages: tuple[str, ...]


@dataclass(frozen=True)
class ErrorDocument:
    """What a command prints in place of its document."""

    error: Error


def render_json(document: object) -> str:
    """Return a document, a dataclass or a model, as JSON; numbers that are not finite become null."""
    from pydantic import TypeAdapter  # slow to import, and not needed for help and completion

    from cloudai_mbridge.report.model import plain

    data: Any = TypeAdapter[Any](type(document)).dump_python(document, mode="json")
    finite = json.loads(json.dumps(data), parse_constant=lambda name: None)
    return json.dumps(plain(finite), indent=2)


def print_json(document: object) -> None:
    """Print a command's JSON document."""
    click.echo(render_json(document))


def wants_json(argv: Sequence[str]) -> bool:
    """Return whether arguments, which may be invalid, request JSON on standard output."""
    words = [*takewhile(lambda word: word != "--", argv), STDOUT]
    if f"--json={STDOUT}" in words:
        return True
    if "--json" not in words:
        return False
    place = words.index("--json")
    return words[place + 1].startswith("-") or not _WITH_A_FILE.intersection(words[:place])


def print_error(kind: str, exit_code: int, text: str) -> None:
    """Print an error as a document, unless standard output is closed."""
    with contextlib.suppress(OSError):
        print_json(ErrorDocument(Error(kind, exit_code, tuple(shortened(text).splitlines()))))
