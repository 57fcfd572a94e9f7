"""`mbridge rehearse`, and `--rehearse` of dry-run and run."""

import sys
from typing import Any

import click

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import SteadyConsole, new_console, print_json, show_rejected
from cloudai_mbridge.commands.options import JSON, REJECTED, request_of, scenario_options
from cloudai_mbridge.errors import OK, POINTS_FAILED
from cloudai_mbridge.files.text import clipped, visible
from cloudai_mbridge.launch.script import REHEARSAL_LEVELS
from cloudai_mbridge.rehearsal import Progress, Rehearsal, RehearsalVerdict, Step
from cloudai_mbridge.rehearsal.record import lines_of

_STYLE = {
    RehearsalVerdict.STARTS: "green",
    RehearsalVerdict.REFUSED: "bold red",
    RehearsalVerdict.NOT_EVALUATED: "yellow",
}


@click.command()
@scenario_options(output_dir=True)
@click.option("--on-slurm", is_flag=True, help="On one core of one node, in the image of the job.")
@click.option(
    "--level",
    type=click.Choice(REHEARSAL_LEVELS),
    default=REHEARSAL_LEVELS[0],
    show_default=True,
    help="step: let each rank take a step of the schedule, too, and match what the ranks communicate.",
)
@REJECTED
@JSON
def rehearse(as_json: bool, on_slurm: bool, level: str, all_rejected: bool, **options: Any) -> int:
    """Build every distinct rank of each accepted point: groups, model, optimizer, checkpoint; without a GPU.

    The training program itself does it, on one core. Nothing is submitted or written.
    """
    console = new_console()
    prepared = pipeline.plan(request_of(options))
    if not as_json:
        show_rejected(console, prepared.plan, in_full=all_rejected)
    rehearsal = _rehearse(console, prepared, on_slurm=on_slurm, level=level, is_quiet=as_json)
    if as_json:
        print_json(rehearsal)
    else:
        _show_end(console, rehearsal)
    return OK if rehearsal.succeeded else POINTS_FAILED


def rehearse_into(
    console: SteadyConsole, prepared: pipeline.Prepared, level: str, *, on_slurm: bool, is_quiet: bool = False
) -> pipeline.Prepared:
    """Return a plan whose refused points are rejected."""
    rehearsal = _rehearse(console, prepared, on_slurm=on_slurm, is_quiet=is_quiet, level=level)
    return pipeline.rehearsed(prepared, rehearsal)


def _rehearse(
    console: SteadyConsole, prepared: pipeline.Prepared, *, on_slurm: bool, is_quiet: bool, level: str
) -> Rehearsal:
    """Rehearse with a line for each point, and on a terminal a line that shows the rank that is being built."""
    live = _Live()
    try:
        shown = _shown(console, live, is_quiet=is_quiet)
        return pipeline.rehearse(prepared, on_slurm=on_slurm, level=level, progress=shown)
    finally:
        live.clear()


def _shown(console: SteadyConsole, live: "_Live", *, is_quiet: bool) -> Progress:
    def show(step: Step) -> None:
        if not step.is_done:
            live.show(step)
            return
        live.clear()
        if not is_quiet:
            console.print_line(step.point.line, _STYLE[step.point.verdict])

    return show


class _Live:
    """A line on the terminal of standard error; nothing if it is none."""

    def __init__(self) -> None:
        self._is_terminal, self._is_shown = sys.stderr.isatty(), False

    def show(self, step: Step) -> None:
        if not self._is_terminal:
            return
        rank = f"rank {step.built + 1} of {step.ranks}" if step.built < step.ranks else "starting"
        text = f"rehearsing point {step.number} of {step.points}: {rank} of {visible(clipped(step.point.name, 60))}"
        click.echo(f"\r\x1b[K{text}", err=True, nl=False)
        self._is_shown = True

    def clear(self) -> None:
        if self._is_shown:
            click.echo("\r\x1b[K", err=True, nl=False)
            self._is_shown = False


def _show_end(console: SteadyConsole, rehearsal: Rehearsal) -> None:
    for line in lines_of(rehearsal):
        console.print_line(line)
