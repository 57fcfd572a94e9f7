"""`mbridge nodes`: which nodes are slow."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import new_console
from cloudai_mbridge.commands.json_output import print_json
from cloudai_mbridge.commands.options import JSON, PATH, Number, request_of, scenario_options
from cloudai_mbridge.commands.run.drive import drive
from cloudai_mbridge.commands.run_names import run_argument
from cloudai_mbridge.errors import OK, BadInput, counted
from cloudai_mbridge.files.replace import require_writable, write_text
from cloudai_mbridge.gate.results.read import RunResult, read_results, without_dry_runs
from cloudai_mbridge.logs.tail import printable
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.models.values.hostlist import expand_hostlist
from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.report.html import render_report_file
from cloudai_mbridge.report.model import plain

if TYPE_CHECKING:
    from cloudai_mbridge.gate.nodes.verdicts import NodesResult

_SHOWN, _MOST_ODD = 4, 20
SLOW_NODES = 10  # as of a regression that a gate finds
_STYLES = {"slow": "bold red", "normal": "green", "too few runs": "yellow"}
_RATE = Number(min=0, max=0.2, min_open=True)
_SHARE = Number(min=0, max=1, min_open=True, max_open=True)

_FALSE_ALARM_RATE = click.option(
    "--false-alarm-rate", type=_RATE, default=0.01, show_default=True, help="Of calling any node slow where none is."
)
_SLOWDOWN = click.option(
    "--slowdown", type=_SHARE, default=0.03, show_default=True, help="A node shown to be slower by less is normal."
)


@click.group()
def nodes() -> None:
    """Find slow nodes: from results, or by running a test on every node."""


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
    """Say from results which nodes slow the runs on them; a RUN may be its report.json.

    Runs of the same point in one report, or in one night of a history, are compared with each other; those of points
    with one run a night, with the other points of the night. Nothing is run, and no node is drained.
    """
    if not results and (history is None or html is not None):
        raise BadInput("give a RUN" + (" for the page" if history else ", or a --history"))
    if html is not None:
        require_writable(html)
    result = _judged(results, false_alarm_rate, slowdown, history)
    if html is not None:
        first, *_ = without_dry_runs(results)[0]  # one at least: there is a result
        write_text(html, render_report_file(first, nodes=plain(result)))
    print_json(result) if as_json else _print(result)
    return SLOW_NODES if fail_on_slow and result.slow else OK


@nodes.command()
@scenario_options(output_dir=True)
@click.option("--nodes", "node_list", required=True, metavar="LIST", help="Nodes to test, such as gb200-[001-064].")
@click.option(
    "--max-runs-per-node",
    type=click.IntRange(2, 100),
    default=4,
    show_default=True,
    help="Rounds, each with all nodes.",
)
@click.option("--max-parallel", type=click.IntRange(min=1), help="Runs active at a time; default: the scenario's.")
@_FALSE_ALARM_RATE
@_SLOWDOWN
@JSON
def test(
    node_list: str,
    max_runs_per_node: int,
    max_parallel: int | None,
    false_alarm_rate: float,
    slowdown: float,
    as_json: bool,
    **options: Any,
) -> int:
    """Run a scenario's only point on every node, in new company each time, until all nodes are decided.

    An interrupted campaign goes on with `mbridge resume RUN`. `mbridge nodes show RUN` shows what it found. No node is
    drained.
    """
    from cloudai_mbridge.gate.nodes.campaign import plan_campaign, write_campaign  # numpy, for this command only

    overrides = {} if max_parallel is None else {"max_parallel": max_parallel}
    prepared = pipeline.plan(request_of(options), overrides)
    if isinstance(prepared.system, LocalSystem):
        raise BadInput(f"{options['system_config']}: is this machine alone; nodes are compared on a cluster")
    template = _only_run(prepared.plan, options["test_scenario"])
    names = expand_hostlist(node_list)
    terms = {"false_alarm_rate": false_alarm_rate, "slowdown": slowdown}
    runs, campaign = plan_campaign(template, names, max_runs_per_node, random.Random(0), **terms)  # noqa: S311 - no secret
    prepared = replace(prepared, plan=replace(prepared.plan, runs=runs))
    pipeline.preflight(prepared)
    root = pipeline.write(prepared, before_the_plan=lambda root: write_campaign(campaign, root))
    console = new_console(stderr=as_json)
    console.print_line(f"results: {root}")
    code = drive(console, prepared, root)
    result = _judged([root], false_alarm_rate, slowdown)
    print_json(result) if as_json else _print(result)
    return code


def _only_run(plan: ScenarioPlan, scenario: Path) -> RunPlan:
    """Return the run that the campaign repeats. BadInput: there is none, or more than one point."""
    runs = [run for run in plan.runs if not run.goes_first]
    points = {f"{run.test_id}/{run.label}" for run in runs}
    if len(points) != 1:
        found = ", ".join(sorted(points)[:_SHOWN]) or "none"
        raise BadInput(f"{scenario}: {counted(len(points), 'point')} ({found}); a campaign repeats exactly one")
    if runs[0].upstream is not None:
        raise BadInput(
            f"{scenario}: its runs go through Megatron-Bridge's launcher, which takes no list of nodes from here"
        )
    return runs[0]


def _judged(
    results: Sequence[Path], false_alarm_rate: float, slowdown: float, history: Path | None = None
) -> "NodesResult":
    # numpy, for this group only
    from cloudai_mbridge.gate.history.store import History
    from cloudai_mbridge.gate.nodes.campaign import judge_rounds, read_campaign
    from cloudai_mbridge.gate.nodes.facts import odd_facts
    from cloudai_mbridge.gate.nodes.verdicts import runs_of_history, runs_on_nodes

    given, skipped = without_dry_runs(results)
    read: list[RunResult] = []
    rounds: dict[tuple[str, str], int] = {}
    done = planned = 1
    for path in given:
        own = read_results(path)
        read += own
        if own and (campaign := read_campaign(Path(own[0].source).parent)):
            number_of = {key: number for number, keys in enumerate(campaign.rounds) for key in keys}
            done = max(done, 1 + max(number_of.get(f"{run.point}/{run.iteration}", 0) for run in own))
            planned = max(planned, len(campaign.rounds))
            rounds |= {(own[0].source, key): number for key, number in number_of.items()}
    runs, notes = runs_on_nodes(read, rounds)
    if history is not None:
        with History(history) as store:
            runs += runs_of_history(store, {run.run_id for run in read})
    result = judge_rounds(runs, done, planned, false_alarm_rate, slowdown)
    return replace(result, notes=(*skipped, *notes, *result.notes), odd=tuple(odd_facts(read)))


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
    for line in (*shown, *(f"note: {note}" for note in result.notes), *_conclusion(result)):
        console.print_line(printable(line))


def _conclusion(result: "NodesResult") -> Sequence[str]:
    """Say what was found, and what an operator may type; mbridge drains nothing."""
    counts = {verdict: sum(node.verdict == verdict for node in result.nodes) for verdict in _STYLES}
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no nodes"
    noise = "" if result.noise is None else f"; runs differ by {result.noise:.2%}"
    lines = [
        f"{text} of {counted(len(result.nodes), 'node')}, from {counted(result.runs, 'run')}{noise};"
        f" false-alarm rate {result.false_alarm_rate:.1%} over all nodes"
    ]
    if result.slow:
        names = ",".join(node.node for node in result.slow)
        lines.append(f"to take them out of service: scontrol update nodename={names} state=drain reason=slow")
    return lines
