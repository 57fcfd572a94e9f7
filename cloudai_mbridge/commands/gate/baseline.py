"""`mbridge baseline promote | show | check`."""

import getpass
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.commands.console import new_console, print_json
from cloudai_mbridge.commands.options import JSON, PATH, Number, run_argument
from cloudai_mbridge.errors import OK, BadInput, MBridgeError, counted
from cloudai_mbridge.files.documents import fill, json_object
from cloudai_mbridge.gate.baseline import Baseline, as_list, load_baseline, replace_if_unchanged
from cloudai_mbridge.gate.policy import NO_REASON, default_metrics, load_policy
from cloudai_mbridge.gate.promotion import MAX_NOISE, MIN_RUNS, Proposal, Terms, difference, oddities, propose, select
from cloudai_mbridge.gate.runs import read_results, without_dry_runs

REFUSED = 15
NOT_CONFIRMED = 16
_WIDTH = 160  # of a table if the output is not a terminal


class PromotionRefused(MBridgeError):
    """The runs cannot become a baseline; one line per reason."""

    exit_code = REFUSED


class ConfirmationNeeded(MBridgeError):
    """The baseline was not written, as there is no terminal to confirm it at."""

    exit_code = NOT_CONFIRMED


PROMOTION = json_object(
    "Promotion",
    "Effect of a promotion on a baseline file. points: those of the runs. difference: a unified diff, by lines.",
    path=Path,
    is_written=bool,
    points=tuple[str, ...],
    difference=list[str],
    notes=tuple[str, ...],
)
BASELINE_CHECK = json_object(
    "BaselineCheck",
    "Warnings about a baseline that can be read; none of them is an error.",
    path=Path,
    points=int,
    oddities=list[str],
)


@click.group()
def baseline() -> None:
    """Promote good runs to a baseline, and show what it holds."""


@baseline.command()
@run_argument("results", "RUN...", nargs=-1, required=True)
@click.option("--baseline", "path", type=PATH, required=True, help="The baseline file; created if it does not exist.")
@click.option("--reason", required=True, help="Why these runs are the new baseline.")
@click.option("--by", help="Who promotes; default: git's user.name, or the login name.")
@click.option("--point", "globs", multiple=True, help="Only points whose name matches; may be given several times.")
@click.option("--policy", type=PATH, help="Policy that supplies margins and tolerances; default: built-in.")
@click.option("--min-runs", type=click.IntRange(min=2), default=MIN_RUNS, show_default=True, help="Runs per point.")
@click.option(
    "--max-noise",
    type=Number(min=0, max=1, min_open=True),
    help=f"Relative standard deviation of the step time between runs; default: the policy's, or {MAX_NOISE}.",
)
@click.option(
    "--accept-regression", is_flag=True, help="Also promote runs that are worse; give the reason with --reason."
)
@click.option(
    "--accept-change",
    is_flag=True,
    help="Also promote different work under a point's name, or its work under another name.",
)
@click.option("--yes", is_flag=True, help="Write without asking.")
@click.option("--dry-run", is_flag=True, help="Show the diff, write nothing.")
@JSON
def promote(results: tuple[Path, ...], path: Path, *, yes: bool, dry_run: bool, as_json: bool, **options: Any) -> int:
    """Make the results of runs the baseline of their points; a RUN may be its report.json.

    All runs of a point must be good and alike. If one point is refused, nothing is written. Shows the diff of the file,
    and writes it after a yes, or with --yes. Exit codes: 0 written, 15 refused, 16 no terminal to confirm it at.
    """
    if as_json and not (yes or dry_run):
        raise BadInput("--json: asks nothing, so give --yes or --dry-run with it")
    terms = _terms(**{name: value for name, value in options.items() if name != "globs"})
    given, skipped = without_dry_runs(results)
    for note in skipped:
        click.echo(f"note: {_printable(note)}", err=as_json)
    points = select([run for result in given for run in read_results(result)], options["globs"])
    while True:
        proposal = propose(path, points, terms)
        if proposal.refusals:
            refused = [(point, reason) for point, reasons in proposal.refusals.items() for reason in reasons]
            lines = [f"refused {_printable(point)}: {_printable(reason)}" for point, reason in refused]
            good = len(proposal.points) - len(proposal.refusals)
            rest = f"; promote the other {good} with --point" if good else ""
            raise PromotionRefused("\n".join([*lines, f"nothing written{rest}"]))
        if not as_json:
            for line in (*difference(proposal), *(f"note: {note}" for note in proposal.notes)):
                click.echo(_printable(line))
        is_wanted = _is_wanted(proposal, yes=yes, dry_run=dry_run)
        is_written = is_wanted and replace_if_unchanged(path, proposal.old, proposal.new)
        if is_wanted and not is_written:
            click.echo(f"{path} has changed meanwhile; looking again", err=as_json)
        elif as_json:
            found = fill(PROMOTION, proposal, is_written=is_written, difference=difference(proposal))
            print_json(found, PROMOTION)
            return OK
        else:
            text = f"written: {path}, {counted(len(proposal.points), 'point')} promoted"
            click.echo(text if is_written else "--dry-run: nothing written" if dry_run else "nothing written")
            return OK


@baseline.command()
@click.argument("path", metavar="FILE", type=PATH)
@JSON
def show(path: Path, as_json: bool) -> int:
    """Show the metrics of every point of a baseline FILE, and who promoted it, when and why."""
    found, console = load_baseline(path), new_console(_WIDTH)
    if as_json:
        print_json(found)
        return OK
    console.print(_table(found))
    for point in found.points:
        runs = f"{counted(len(point.runs), 'run')}, promoted {point.promoted_at} by {point.promoted_by}: {point.reason}"
        for line in (f"{point.point}: {runs}", *(f"  accepted: {text}" for text in point.accepted)):
            console.print_line(_printable(line))
    return OK


@baseline.command()
@click.argument("path", metavar="FILE", type=PATH)
@click.option("--max-age-days", type=click.IntRange(min=1), default=90, show_default=True, help="Warn if older.")
@JSON
def check(path: Path, max_age_days: int, as_json: bool) -> int:
    """Check that a baseline FILE can be read and agrees with itself, and say what looks wrong in it."""
    loaded = load_baseline(path)
    found = oddities(loaded, datetime.now(UTC), max_age_days)
    if as_json:
        print_json({"path": path, "points": len(loaded.points), "oddities": found}, BASELINE_CHECK)
        return OK
    for text in found:
        click.echo(f"warn  {_printable(text)}")
    click.echo(f"ok    {path}: {counted(len(loaded.points), 'point')}, {counted(len(found), 'warning')}")
    return OK


def _terms(
    *, reason: str, by: str | None, policy: Path | None, min_runs: int, max_noise: float | None, **accept: bool
) -> Terms:
    if reason.strip() in ("", NO_REASON):
        raise BadInput(f"--reason: is {reason!r}; write why these runs are the new baseline, for who reads it later")
    terms = load_policy(policy).policy if policy else None
    max_noise = max_noise or (terms.max_noise if terms else None) or MAX_NOISE
    return Terms(
        by=(by or user_name()).strip() or "unknown",
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=reason.strip(),
        min_runs=min_runs,
        max_noise=max_noise,
        metrics=terms.metrics if terms else default_metrics(),
        **accept,
    )


def user_name() -> str:
    """Return git's user.name, else the login name."""
    try:
        asked = subprocess.run(["git", "config", "user.name"], capture_output=True, timeout=10, check=False)
        if name := asked.stdout.decode(errors="replace").strip():
            return name
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return "unknown"


def _is_wanted(proposal: Proposal, *, yes: bool, dry_run: bool) -> bool:
    """Return whether to write; raise ConfirmationNeeded without a terminal for the confirmation."""
    if dry_run:
        return False
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfirmationNeeded(
            f"{proposal.path}: not written: there is no terminal to confirm it at; write it with --yes,"
            " or look at the difference only with --dry-run"
        )
    return click.confirm(f"Write {proposal.path}?", default=False)


def _table(found: Baseline) -> Table:
    table = Table()
    for name in ("point", "metric"):
        table.add_column(name, overflow="fold")
    for name in ("value", "noise", "n", "bounds"):
        table.add_column(name, justify="right")
    for point in found.points:
        for i, metric in enumerate(point.metrics):
            values = as_list(metric.value)
            shown = " → ".join(f"{value:.5g}" for value in dict.fromkeys((values[0], values[-1])))
            bounds = f"{metric.bounds.lower:+.1%} to {metric.bounds.upper:+.1%}" if metric.bounds else ""
            noise = "unknown" if metric.noise is None else f"{metric.noise:.2%}"
            cells = (point.point if i == 0 else "", metric.name, f"{shown} {metric.unit}", noise, metric.n, bounds)
            table.add_row(*(Text(_printable(str(cell))) for cell in cells))
    return table


def _printable(text: str) -> str:
    """Escape unprintable characters, such as a terminal's control sequences in a name."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
