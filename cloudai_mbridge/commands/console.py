"""Consoles for the commands' output."""

import contextlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

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


MOST_REJECTED_LINES = 12


def show_error(text: str) -> None:
    """Print each line of a text as an error."""
    click.echo("\n".join(f"error: {line}" for line in shortened(text).splitlines()), err=True)


def show_rejected(console: SteadyConsole, plan: "ScenarioPlan", *, in_full: bool = False) -> None:
    """Print the number of accepted and rejected points, with the reasons; if many are rejected, by rule."""
    num_runs = sum(not run.is_again for run in plan.runs)
    console.print(Text(f"{counted(num_runs, 'run')} accepted, {counted(plan.num_rejected, 'point')} rejected"))
    for note in plan.notes:
        console.print_line(f"note: {note}")
    rejected = [(point, violation) for point in plan.rejected for violation in point.violations]
    if in_full or len(rejected) <= MOST_REJECTED_LINES:
        for point, violation in rejected:
            console.print_line(shortened(f"rejected {point.test_id}/{point.label}: {violation}"))
        _show_hint(console, plan.rule_counts)
        return
    first = {violation.rule_id: (point, violation) for point, violation in reversed(rejected)}
    for rule, count in plan.rule_counts.items():
        such = f"; such as {first[rule][0].test_id}/{first[rule][0].label}: {first[rule][1]}" if rule in first else ""
        console.print_line(shortened(f"rejected by {rule}: {counted(count, 'point')}{such}"))
    console.print_line("every rejected point: --rejected")
    _show_hint(console, plan.rule_counts)


def _show_hint(console: SteadyConsole, rule_ids: Iterable[str]) -> None:
    from cloudai_mbridge.constraints.rule_docs import details_hint  # slow to import for help

    if hint := details_hint(rule_ids):
        console.print_line(hint)
