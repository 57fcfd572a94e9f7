"""Consoles and JSON documents: the commands' output.

`--json` prints one JSON document on standard output, for an error too (docs/scripting.md).
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.text import Text

from cloudai_mbridge.errors import counted, shortened

if TYPE_CHECKING:
    from cloudai_mbridge.plan import ScenarioPlan


class SteadyConsole(Console):
    """Console that survives a closed pipe."""

    def print_line(self, text: str, style: str = "") -> None:
        """Print text as it is, on a line of its own however long."""
        self.print(Text(text, style=style), soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Write to nowhere from now on, instead of ending the process."""
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def new_console(width: int = 140, *, stderr: bool = False) -> SteadyConsole:
    """Return a console that keeps tables of this width whole if the output is not a terminal."""
    console = SteadyConsole(highlight=False, stderr=stderr)
    return console if console.is_terminal else SteadyConsole(highlight=False, stderr=stderr, width=width)


_T = TypeVar("_T")
_PATIENCE_S, _PERIOD_S = 1.0, 0.25


def counting(what: str) -> Callable[[Iterator[_T], int], Iterator[_T]] | None:
    """Return a function that passes points on and counts them on standard error; None if that is no terminal.

    what: the words before the count. Nothing is shown of a short count.
    """
    if not sys.stderr.isatty():
        return None

    def count(points: Iterator[_T], total: int) -> Iterator[_T]:
        shown_at, is_shown = time.monotonic() + _PATIENCE_S, False
        try:
            for number, point in enumerate(points):
                if number % 64 == 0 and (now := time.monotonic()) >= shown_at:
                    click.echo(f"\r{what}: {number:,} of {total:,} points", err=True, nl=False)
                    shown_at, is_shown = now + _PERIOD_S, True
                yield point
        finally:
            if is_shown:
                click.echo("\r\x1b[K", err=True, nl=False)

    return count


MOST_REJECTED_LINES = 12


def show_error(text: str) -> None:
    """Print each line of a text as an error."""
    click.echo("\n".join(f"error: {line}" for line in shortened(text).splitlines()), err=True)


def show_rejected(console: SteadyConsole, plan: "ScenarioPlan", *, in_full: bool = False) -> None:
    """Print the number of accepted and rejected points, with the reasons; if many are rejected, or alike, by rule."""
    from cloudai_mbridge.constraints.rule_docs import details_hint  # slow to import for help

    num_runs = sum(not run.is_again for run in plan.runs)
    console.print(Text(f"{counted(num_runs, 'run')} accepted, {counted(plan.num_rejected, 'point')} rejected"))
    lines = [f"note: {note}" for note in plan.notes]
    rejected = [(f"{p.test_id}/{p.label}: {violation}", violation) for p in plan.rejected for violation in p.violations]
    differ = len({str(violation) for _, violation in rejected}) == len(rejected)
    if in_full or (differ and len(rejected) <= MOST_REJECTED_LINES):
        lines += [shortened(f"rejected {text}") for text, _ in rejected]
    else:
        first = {violation.rule_id: f"; such as {text}" for text, violation in reversed(rejected)}
        for rule, count in plan.rule_counts.items():
            lines.append(shortened(f"rejected by {rule}: {counted(count, 'point')}{first.get(rule, '')}"))
        lines.append("every rejected point: --rejected")
    for line in filter(None, (*lines, details_hint(plan.rule_counts))):
        console.print_line(line)


STDOUT = "-"
_WITH_A_FILE = {"gate", "compare"}  # their --json accepts a file name


def render_json(document: Any, form: Any = None) -> str:
    """Return a document as JSON; numbers that are not finite become null.

    form: the type of a document that is a dict, of `json_object`; default: that of a dataclass or a model.
    """
    from pydantic import TypeAdapter  # slow to import, and not needed for help and completion

    from cloudai_mbridge.report.model import plain

    if form is not None and [*document] != [*form.__annotations__]:
        raise TypeError(f"{form.__name__} has the keys {[*form.__annotations__]}, not {[*document]}")
    data: Any = TypeAdapter[Any](form or type(document)).dump_python(document, mode="json")
    finite = json.loads(json.dumps(data), parse_constant=lambda name: None)
    return json.dumps(plain(finite), indent=2)


def print_json(document: Any, form: Any = None) -> None:
    """Print a command's JSON document, as `render_json` returns it."""
    click.echo(render_json(document, form))


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
        print_json(error_document(kind, exit_code, text))


def error_document(kind: str, exit_code: int, text: str) -> dict[str, Any]:
    """Return an error as a document."""
    return {"error": {"kind": kind, "exit_code": exit_code, "messages": shortened(text).splitlines()}}
