"""Files that a command writes for the user to keep: checked before writing, and overwritten only with --force."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from cloudai_mbridge import pipeline
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.replace import require_writable, write_text
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.training.process.provenance import output_of

FORCE: Callable[..., Any] = click.option("--force", is_flag=True, help="Overwrite files that exist.")


def write_files(files: Mapping[Path, str], *, force: bool) -> None:
    """Write all files and print their names. BadInput: a file exists without force; nothing is written."""
    new = {path: text for path, text in files.items() if not _holds(path, text)}
    there = [str(path) for path in new if path.is_symlink() or path.exists()]
    if there and not force:
        verb = "exist" if len(there) > 1 else "exists"
        raise BadInput(f"{', '.join(there)}: {verb} already; nothing was written; --force overwrites")
    for path in new:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise BadInput(f"{path.parent}: is not a directory; move what is there, or write elsewhere") from None
        require_writable(path)
    for path, text in new.items():
        write_text(path, text)
    for path in files:
        click.echo(visible(f"{'written' if path in new else 'unchanged'}: {path}"))


def ignore_results(name: str) -> None:
    """Add a directory below this one to .gitignore, unless git ignores it already. Without a repository: nothing."""
    if output_of("git", "rev-parse", "--is-inside-work-tree") != "true" or output_of("git", "check-ignore", f"{name}/"):
        return
    path = Path(".gitignore")
    if path.exists() and not path.is_file():
        return
    text = path.read_bytes() if path.exists() else b""
    with path.open("ab") as file:
        file.write((b"\n" if text and not text.endswith(b"\n") else b"") + f"{name}/\n".encode())
    click.echo(f"{'changed' if text else 'written'}: {path}: git ignores {name}/")


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


def require_points(system: Path, scenario: Path, tests_dir: Path | None) -> pipeline.Prepared:
    """Return the plan of a scenario on a system; BadInput: an invalid file, or no point left by the rules."""
    prepared = pipeline.plan(pipeline.Request(system, scenario, tests_dir, None))
    if not prepared.plan.runs:
        reasons = dict.fromkeys(str(violation) for point in prepared.plan.rejected for violation in point.violations)
        raise BadInput(f"the scenario has no point that would run: {'; '.join(reasons)}")
    return prepared


def options_of(system: Path, scenario: Path, tests_dir: Path | None) -> str:
    """Return the options of `mbridge run` that name the files, quoted for a shell."""
    return shlex.join(pipeline.Request(system, scenario, tests_dir, None).options)
