"""Runs by name: what a command accepts in place of the path of a run's directory."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from cloudai_mbridge.files.text import visible
from cloudai_mbridge.plan.read import LATEST, find_run, find_runs

RUN_TEXT = f"RUN is the directory of a run, the beginning of its name (see `mbridge runs`), or `{LATEST}`."


def as_run(value: str) -> Path:
    """Return the path that a user gives, or that of the run whose name it is: a type for click's parameters."""
    if not value or os.sep in value or not _is_missing(value):
        return Path(value)
    root = find_run(value)
    click.echo(f"note: {visible(value)} is {visible(str(root))}", err=True)
    return root


def _is_missing(path: str) -> bool:
    """Return whether there is nothing at a path; of one that cannot exist, the command says why."""
    try:
        os.lstat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def run_argument(name: str, metavar: str = "RUN", **options: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add an argument that is a run, and to the command's help what that may be."""

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        text = inspect.getdoc(command) or ""
        command.__doc__ = text if RUN_TEXT in text else f"{text}\n\n{RUN_TEXT}"
        return click.argument(name, metavar=metavar, type=as_run, shell_complete=complete_run, **options)(command)

    return decorate


def complete_run(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a run; what has a slash is a path, which the shell completes."""
    names = [LATEST, *(run.name for run in find_runs())]
    found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="dir")]


# Links are resolved. A circle of links stays, and is not the directory of a run
RUN_ROOT = run_argument("root", callback=lambda ctx, param, value: Path(os.path.realpath(value)))
