"""The command line: the only place that turns exceptions into exit codes."""

import errno
import io
import sqlite3
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import click

from cloudai_mbridge.commands.console import print_error, show_error, wants_json
from cloudai_mbridge.commands.table import CommandTable
from cloudai_mbridge.errors import OK, BadInput, MBridgeError, ToolFailure
from cloudai_mbridge.files.replace import free_space, is_disk_full
from cloudai_mbridge.start_up import INTERRUPTED
from cloudai_mbridge.version import __version__

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@click.group("mbridge", cls=CommandTable, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mbridge")
@click.option("--log-level", type=click.Choice(_LEVELS, case_sensitive=False), help="Accepted as in CloudAI.")
@click.option("--log-file", type=click.Path(path_type=Path), help="Accepted as in CloudAI.")
def cli(log_level: str | None, log_file: Path | None) -> None:
    """Describe LLM-training benchmarks in TOML, sweep them, check them, run them, judge them."""
    given = [name for name, value in (("--log-level", log_level), ("--log-file", log_file)) if value]
    if given:
        verb = "have" if len(given) > 1 else "has"
        click.echo(f"note: {', '.join(given)} {verb} no effect; `mbridge status --events` prints the details", err=True)


def _kind_and_text(error: Exception) -> tuple[type[MBridgeError], str]:
    if isinstance(error, click.ClickException):
        return BadInput, error.format_message()
    if isinstance(error, sqlite3.Error):
        return ToolFailure, f"the journal cannot be read or written: {error}"
    if isinstance(error, OSError):
        where, why = error.filename or "the operating system", error.strerror or error
        if error.filename and is_disk_full(error, Path(where)):
            why = f"{why} ({free_space(Path(where))}); make room and try again"
        elif error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return BadInput, f"{where}: {why}; check the path"
        return ToolFailure, f"{where}: {why}"
    traceback.print_exception(error)
    return ToolFailure, "this is a bug in mbridge; please report it with the lines above"


def _show(kind: str, exit_code: int, text: str) -> NoReturn:
    """Show an error, with --json as a document too, and exit."""
    show_error(text)
    if wants_json(sys.argv[1:]):
        print_error(kind, exit_code, text)
    sys.exit(exit_code)


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a report must not fail on characters that a terminal cannot show
    try:
        sys.exit(cli.main(prog_name="mbridge", standalone_mode=False) or OK)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(BadInput.exit_code)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        if wants_json(sys.argv[1:]):
            print_error("Interrupted", INTERRUPTED, "interrupted")
        sys.exit(INTERRUPTED)
    except MBridgeError as error:
        _show(type(error).__name__, error.exit_code, str(error))
    except Exception as error:
        kind, text = _kind_and_text(error)
        _show(kind.__name__, kind.exit_code, text)


if __name__ == "__main__":
    main()
