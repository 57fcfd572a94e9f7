"""`mbridge nodes`: find slow nodes."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.commands.console import new_console, print_json
from cloudai_mbridge.commands.options import JSON, PATH, Number, run_argument
from cloudai_mbridge.errors import OK, BadInput, counted
from cloudai_mbridge.files.replace import require_page, write_text
from cloudai_mbridge.gate.runs import read_results, without_dry_runs
from cloudai_mbridge.logs.tail import printable
from cloudai_mbridge.report.html import render_report_file
from cloudai_mbridge.report.model import plain

if TYPE_CHECKING:
    from cloudai_mbridge.gate.nodes import NodesResult

_SHOWN, _MOST_ODD = 4, 20
SLOW_NODES = 10  # same as for a regression found by a gate
_STYLES = {"slow": "bold red", "normal": "green", "too few runs": "yellow"}
_RATE = Number(min=0, max=0.2, min_open=True)
_SHARE = Number(min=0, max=1, min_open=True, max_open=True)

_FALSE_ALARM_RATE = click.option(
    "--false-alarm-rate", type=_RATE, default=0.01, show_default=True, help="Family-wise false-alarm rate."
)
_SLOWDOWN = click.option(
    "--slowdown", type=_SHARE, default=0.03, show_default=True, help="A node shown to be slower by less is normal."
)


@click.group()
def nodes() -> None:
    """Find slow nodes."""


@nodes.command()
@run_argument("results", "RUN...", nargs=-1, required=False)
@click.option("--history", type=PATH, help="Also take the runs of this history.")
@_FALSE_ALARM_RATE
@_SLOWDOWN
@JSON
@click.option("--html", type=PATH, help="Also write the page of the first result with a map of the nodes.")
@click.option("--fail-on-slow", is_flag=True, help=f"Exit with {SLOW_NODES} if a node is slow.")
def show(
    results: tuple[Path, ...],
    history: Path | None,
    false_alarm_rate: float,
    slowdown: float,
    as_json: bool,
    html: Path | None,
    fail_on_slow: bool,
) -> int:
    """Find in results the nodes that slow the runs on them; a RUN may be its report.json.

    Runs of the same point in one report, or in one night of a history, are compared with each other; those of points
    with one run a night, with the other points of the night. Nothing is run, and no node is drained.
    """
    if not results and (history is None or html is not None):
        raise BadInput("give a RUN" + (" for the page" if history else ", or a --history"))
    if html is not None:
        require_page(html)
    # numpy, for this command only
    from cloudai_mbridge.gate.history import History
    from cloudai_mbridge.gate.nodes import judge_nodes, odd_facts, runs_of_history, runs_on_nodes

    given, skipped = without_dry_runs(results)
    read = [run for path in given for run in read_results(path)]
    runs, notes = runs_on_nodes(read)
    if history is not None:
        with History(history) as store:
            runs += runs_of_history(store, {run.run_id for run in read})
    result = judge_nodes(runs, false_alarm_rate=false_alarm_rate, slowdown=slowdown)
    result = replace(result, notes=(*skipped, *notes, *result.notes), odd=tuple(odd_facts(read)))
    if html is not None:  # at least one is given: a page needs a result
        write_text(html, render_report_file(given[0], nodes=plain(result)))
    print_json(result) if as_json else _print(result)
    return SLOW_NODES if fail_on_slow and result.slow else OK


@nodes.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def test() -> int:
    """Name what has replaced it."""
    raise BadInput("nodes test is no longer there: run a test with `iterations`, and `mbridge nodes show` its results")


def _print(result: "NodesResult") -> None:
    console = new_console()
    table = Table()
    table.add_column("node", overflow="fold")
    for name in ("effect", "95 % interval", "runs"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for node in result.nodes:
        effect = "" if node.effect is None else f"{node.effect:+.1%}"
        interval = "" if node.interval is None else " to ".join(f"{bound:+.1%}" for bound in node.interval)
        verdict = Text(str(node.verdict), style=_STYLES[node.verdict])
        table.add_row(Text(printable(node.node)), effect, interval, str(node.runs), verdict)
    console.print(table)
    odd = [f"{odd.node}: {odd.fact} is {odd.value}; {odd.others} others have {odd.usual}" for odd in result.odd]
    shown = [*odd[:_MOST_ODD], *([f"{len(odd) - _MOST_ODD} more differences"] if len(odd) > _MOST_ODD else [])]
    counts = {verdict: sum(node.verdict == verdict for node in result.nodes) for verdict in _STYLES}
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    noise = "" if result.noise is None else f"; runs differ by {result.noise:.2%}"
    conclusion = [
        f"{counted(len(result.nodes), 'node')}{f': {text}' if text else ''}; from {counted(result.runs, 'run')}{noise};"
        f" false-alarm rate {result.false_alarm_rate:.1%} over all nodes"
    ]
    if result.slow:  # a command for the operator: mbridge drains nothing
        names = ",".join(node.node for node in result.slow)
        conclusion.append(f"to take them out of service: scontrol update nodename={names} state=drain reason=slow")
    for line in (*shown, *(f"note: {note}" for note in result.notes), *conclusion):
        console.print_line(printable(line))
