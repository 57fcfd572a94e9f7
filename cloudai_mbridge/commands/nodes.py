"""`mbridge nodes`: which nodes are slow."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.commands.live_view import new_console
from cloudai_mbridge.commands.options import PATH
from cloudai_mbridge.errors import OK, counted
from cloudai_mbridge.gate.results.read import read_results, without_dry_runs
from cloudai_mbridge.logs.tail import printable
from cloudai_mbridge.report.model import plain

if TYPE_CHECKING:
    from cloudai_mbridge.gate.nodes.verdicts import NodesResult

SLOW_NODES = 10  # as of a regression that a gate finds
_STYLES = {"slow": "bold red", "normal": "green", "too few runs": "yellow"}
_RATE = click.FloatRange(min=0, max=0.2, min_open=True)
_SHARE = click.FloatRange(min=0, max=1, min_open=True, max_open=True)


@click.group()
def nodes() -> None:
    """Find slow nodes: from results, or by running a test on every node."""


@nodes.command()
@click.argument("results", nargs=-1, required=True, type=PATH)
@click.option(
    "--false-alarm-rate", type=_RATE, default=0.01, show_default=True, help="Of calling any node slow where none is."
)
@click.option(
    "--slowdown", type=_SHARE, default=0.03, show_default=True, help="A node shown to be slower by less is normal."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--fail-on-slow", is_flag=True, help=f"Exit with {SLOW_NODES} if a node is slow.")
def show(results: tuple[Path, ...], false_alarm_rate: float, slowdown: float, as_json: bool, fail_on_slow: bool) -> int:
    """Say from RESULTS (report.json files or runs' directories) which nodes slow the runs on them.

    Runs of the same point in one report are compared with each other. Nothing is run, and no node is drained.
    """
    from cloudai_mbridge.gate.nodes.verdicts import judge_nodes, runs_on_nodes  # numpy, for this command only

    given, skipped = without_dry_runs(results)
    runs, notes = runs_on_nodes(run for path in given for run in read_results(path))
    result = judge_nodes(runs, false_alarm_rate=false_alarm_rate, slowdown=slowdown, notes=[*skipped, *notes])
    if as_json:
        click.echo(json.dumps(plain(result), indent=2))
    else:
        _print(result)
    return SLOW_NODES if fail_on_slow and result.slow else OK


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
    for line in (*(f"note: {note}" for note in result.notes), *_conclusion(result)):
        console.print_line(printable(line))


def _conclusion(result: "NodesResult") -> Sequence[str]:
    """Say what was found, and what an operator may type; mbridge drains nothing."""
    counts = {verdict: sum(node.verdict == verdict for node in result.nodes) for verdict in _STYLES}
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no nodes"
    noise = "" if result.noise is None else f"; runs differ by {result.noise:.2%}"
    lines = [
        f"{text} of {counted(len(result.nodes), 'node')}, from {counted(result.runs, 'run')}{noise};"
        f" false-alarm rate at most {result.false_alarm_rate:.1%} over all nodes"
    ]
    if result.slow:
        names = ",".join(node.node for node in result.slow)
        lines.append(f"to take them out of service: scontrol update nodename={names} state=drain reason=slow")
    return lines
