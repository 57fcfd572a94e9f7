"""What the commands print with."""

import contextlib
import os

import click
from rich.console import Console
from rich.text import Text

from cloudai_mbridge.errors import shortened


class SteadyConsole(Console):
    """A console whose reader may go away: the runs go on, and nothing more is printed."""

    def print_line(self, text: str, style: str = "") -> None:
        """Print text as it is, on a line of its own however long."""
        self.print(Text(text, style=style), soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Write to nowhere from now on, instead of ending the process."""
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def new_console(width: int = 140) -> SteadyConsole:
    """Return a console that keeps tables of this width whole where the output is not a terminal."""
    console = SteadyConsole(highlight=False)
    return console if console.is_terminal else SteadyConsole(highlight=False, width=width)


def show_error(text: str) -> None:
    """Print each line of a text as an error."""
    click.echo("\n".join(f"error: {line}" for line in shortened(text).splitlines()), err=True)
