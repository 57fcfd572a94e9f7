"""The command line: arguments to pipeline, and the only place where exceptions become exit codes."""

import errno
import io
import os
import sqlite3
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.table import Table
from rich.text import Text

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.baseline import baseline
from cloudai_mbridge.commands.calibrate import calibrate
from cloudai_mbridge.commands.drive import drive, show_error, show_rejected, show_report, submit
from cloudai_mbridge.commands.estimate import estimate, proxy
from cloudai_mbridge.commands.export import export
from cloudai_mbridge.commands.gate import compare, gate
from cloudai_mbridge.commands.history import history
from cloudai_mbridge.commands.init import init
from cloudai_mbridge.commands.live_view import new_console, observer_for
from cloudai_mbridge.commands.nodes import nodes
from cloudai_mbridge.commands.options import ALLOW_UNKNOWN, PATH, RULES, request_of, scenario_options
from cloudai_mbridge.commands.run_names import RUN_TEXT, as_run, run_argument
from cloudai_mbridge.commands.runs import runs
from cloudai_mbridge.commands.schema import schema
from cloudai_mbridge.commands.show import show
from cloudai_mbridge.commands.sweep import sweep
from cloudai_mbridge.commands.tune import tune
from cloudai_mbridge.commands.verify import summarize_foreign, verify
from cloudai_mbridge.commands.watch import watch
from cloudai_mbridge.constraints.engine import RULES as ALL_RULES
from cloudai_mbridge.constraints.lifts import LIFTS
from cloudai_mbridge.constraints.upstream import rule_id as rule_id_of
from cloudai_mbridge.errors import OK, POINTS_FAILED, BadInput, Damaged, MBridgeError, ToolFailure, counted
from cloudai_mbridge.files.disk import free_space, is_disk_full
from cloudai_mbridge.gate.history.store import History
from cloudai_mbridge.install.commands import register as register_install_commands
from cloudai_mbridge.logs.tail import tail_lines
from cloudai_mbridge.models.loading.load import Warn
from cloudai_mbridge.models.test_definition import TEMPLATE
from cloudai_mbridge.plan.read import read_plan_data, refuse_dry_run
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.report.formats.text import visible
from cloudai_mbridge.runner import control
from cloudai_mbridge.runner.interrupt import Interrupted
from cloudai_mbridge.runner.lock import driver_lock, no_driver
from cloudai_mbridge.version import __version__

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mbridge")
@click.option("--log-level", type=click.Choice(_LEVELS, case_sensitive=False), help="Accepted as in CloudAI.")
@click.option("--log-file", type=PATH, help="Accepted as in CloudAI.")
def cli(log_level: str | None, log_file: Path | None) -> None:
    """Describe LLM-training benchmarks in TOML, sweep them, check them, run them, judge them."""
    given = [name for name, value in (("--log-level", log_level), ("--log-file", log_file)) if value]
    if given:
        verb = "have" if len(given) > 1 else "has"
        click.echo(f"note: {', '.join(given)} {verb} no effect; `mbridge status --events` prints the details", err=True)


@cli.command()
@scenario_options(output_dir=True)
@click.option("--max-parallel", type=click.IntRange(min=1), help="Runs active at a time; default: the scenario's.")
@click.option("--fail-fast", is_flag=True, help="Stop everything at the first run that fails.")
def run(max_parallel: int | None, fail_fast: bool, **options: Any) -> int:
    """Check, submit, watch and report all points of a scenario."""
    console = new_console()
    overrides = {"max_parallel": max_parallel, "fail_fast": fail_fast or None}
    prepared = pipeline.plan(request_of(options), {k: v for k, v in overrides.items() if v is not None})
    return submit(console, prepared)


# Without links. A circle of them stays, and is not the directory of a run
_ROOT = run_argument("root", callback=lambda ctx, param, value: Path(os.path.realpath(value)))
_LOST_HOST = click.option(
    "--lost-host",
    "lost_hosts",
    multiple=True,
    metavar="NAME",
    help="A machine that is gone for good: mbridge's processes there count as killed.",
)


@cli.command()
@_ROOT
@_LOST_HOST
def resume(root: Path, lost_hosts: tuple[str, ...]) -> int:
    """Continue a run whose mbridge process ended before its jobs did. Nothing is submitted twice."""
    control.require_resumable(root, lost_hosts)
    prepared = pipeline.read(root)
    pipeline.preflight(prepared)
    return drive(new_console(), prepared, root)


@cli.command()
@_ROOT
@click.option("--events", is_flag=True, help="Also print every event.")
def status(root: Path, events: bool) -> int:
    """Show where a run's points stand, from its journal."""
    console, found = new_console(), control.read_status(root, with_events=events)
    table = Table(
        "point", "state", "job", "nodes", "attempts", "why", title=Text(visible(found.scenario)), title_justify="left"
    )
    for row in found.runs:
        cells = (row.key, row.state, row.job_id, row.nodes, str(row.num_attempts or ""), row.why)
        table.add_row(*(Text(visible(cell)) for cell in cells))
    console.print(table)
    lines = [f"node {node} is excluded: {reason}" for node, reason in found.excluded.items()]
    lines += [f"{event.at} {event.key or '-'}: {event.text}" for event in found.events]
    counts = ", ".join(f"{count} {state}" for state, count in sorted(found.counts.items()))
    lines.append(f"{counts or 'no runs'}; {_what_next(found, root)}")
    for line in lines:
        console.print_line(visible(line))
    return _show_damage(found)


def _show_damage(found: control.SweepStatus) -> int:
    for text in found.damage:
        show_error(visible(f"damaged: {text}"))
    return Damaged.exit_code if found.damage else OK


def _what_next(found: control.SweepStatus, root: Path) -> str:
    """Say which process holds a run, or how it goes on without one."""
    if found.is_dry_run:
        return "a dry run: nothing was submitted; start its scenario with: mbridge run"
    if found.driver:
        return f"held by {found.driver}"
    return f"no running process holds this run; continue with: mbridge resume {root}" if found.is_open else "finished"


@cli.command()
@_ROOT
@_LOST_HOST
def cancel(root: Path, lost_hosts: tuple[str, ...]) -> int:
    """Cancel everything that a run has submitted, wait until it has ended, and report."""
    console = new_console()
    refuse_dry_run(root, read_plan_data(root))
    control.cancel_run(root)
    control.require_resumable(root, lost_hosts)
    prepared = pipeline.read(root, needs_secrets=False)
    with driver_lock(root):
        try:  # also after a driver has done it: it may have ended for another reason
            with observer_for(console, prepared.plan, root) as observer:
                pipeline.execute(prepared, root, observer, only_cancel=True)
        except Interrupted as done:
            if done.left_running:
                raise
        show_report(console, root)
    return OK


@cli.command()
@_ROOT
@click.argument("point", required=False)
@click.option("--stderr", is_flag=True, help="The run's stderr instead of its stdout.")
@click.option("--attempt", type=click.IntRange(min=1), help="An earlier attempt of the run; default: the last.")
@click.option("--lines", "-n", type=click.IntRange(min=0), help="Only the last lines.")
@click.option("--follow", "-f", is_flag=True, help="Follow the log until Ctrl-C.")
def logs(root: Path, point: str | None, stderr: bool, attempt: int | None, lines: int | None, follow: bool) -> int:
    """Print the log of one POINT: its key, or a part of it that no other has. Without one, list the points."""
    if point is None:
        if stderr or follow or attempt is not None or lines is not None:
            raise BadInput(f"POINT: is missing; list the points with: mbridge logs {root}")
        return _list_points(root)
    for line in tail_lines(control.find_log(root, point, attempt, stderr=stderr), lines, follow=follow):
        click.echo(line)
    return OK


def _list_points(root: Path) -> int:
    """Print the key and the state of every point."""
    refuse_dry_run(root, read_plan_data(root))
    found = control.read_status(root)
    width = max((len(row.key) for row in found.runs), default=0)
    for row in found.runs:
        click.echo(visible(f"{row.key:{width}}  {row.state}"))
    return _show_damage(found)


@cli.command("dry-run")
@scenario_options(output_dir=True)
def dry_run(**options: Any) -> int:
    """Check all points and write exactly the files that `run` would submit."""
    console = new_console()
    prepared = pipeline.plan(request_of(options))
    show_rejected(console, prepared)
    root = pipeline.write(prepared, dry_run=True)
    for planned in prepared.plan.runs:
        if planned.is_again:
            continue
        placed = f"{counted(planned.world_size, 'rank')} on {counted(planned.num_nodes, 'node')}"
        console.print_line(f"accepted {planned.key}: {placed}")
    console.print_line(f"written: {root}")
    return OK if prepared.plan.runs else POINTS_FAILED


@cli.command("verify-configs")
@click.argument("configs", type=PATH)
@click.option("--system-config", type=PATH, help="Also check placement on this system.")
@click.option("--tests-dir", type=PATH, help="Where scenarios find their tests.")
@click.option("--hook-dir", type=PATH, help="Directory of the hooks' TOMLs; default: as for `run`.")
@ALLOW_UNKNOWN
@RULES
def verify_configs(on_unknown_arg: Warn | None, **options: Any) -> int:
    """Check a TOML file, or all of a directory; nothing is run or written."""
    findings = []
    for finding in verify(**options, warn=on_unknown_arg):
        findings.append(finding)
        if not finding.is_good:
            show_error(finding.text)
        elif not finding.is_foreign:
            click.echo(f"ok    {finding.path}: {finding.text}")
    for line in summarize_foreign(findings):
        click.echo(f"skipped (not {TEMPLATE}): {line}")
    return OK if all(finding.is_good for finding in findings) else BadInput.exit_code


@cli.command("generate-report")
@click.option("--result-dir", type=as_run, metavar="RUN", required=True, help=RUN_TEXT)
@click.option("--history", "history_file", type=PATH, help="Show the points' earlier runs in report.html.")
@click.option("--system-config", type=PATH, help="Accepted as in CloudAI; the directory knows its system.")
@click.option("--tests-dir", type=PATH, help="Accepted as in CloudAI; the directory knows its tests.")
@click.option("--test-scenario", type=PATH, help="Accepted as in CloudAI; the directory knows its scenario.")
@click.option("--hook-dir", type=PATH, help="Accepted as in CloudAI; the directory knows its hooks.")
def generate_report(result_dir: Path, history_file: Path | None, **_: Path | None) -> int:
    """Judge a run's directory again and rewrite its reports."""
    refuse_dry_run(result_dir, read_plan_data(result_dir))
    control.require_writable_run(result_dir)
    options = {"find_history": partial(_history_rows, history_file)} if history_file else {}
    with no_driver(result_dir):
        return OK if show_report(new_console(), result_dir, **options).succeeded else POINTS_FAILED


def _history_rows(path: Path, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    from cloudai_mbridge.gate.trend.words import history_rows  # numpy, for this command only

    with History(path) as store:
        return history_rows(store, report)


register_install_commands(cli)
for command in (
    init,
    watch,
    show,
    sweep,
    gate,
    compare,
    baseline,
    history,
    nodes,
    estimate,
    proxy,
    tune,
    calibrate,
    runs,
    schema,
    export,
):
    cli.add_command(command)


@cli.command("list")
@click.argument("what", required=False, type=click.Choice(["agents", "reports"], case_sensitive=False))
@click.option("--verbose", "-v", is_flag=True, help="Accepted as in CloudAI; nothing is left out.")
def list_(what: str | None, verbose: bool) -> int:
    """List the recipes and the rules; or the agents, or the reports, as CloudAI does."""
    if what:
        for name, text in (_AGENTS if what == "agents" else _REPORTS).items():
            click.echo(f"{name}: {text}")
        return OK
    recipes = Table("recipe", "description", title="Recipes", title_justify="left")
    for name in recipe_names():
        recipes.add_row(name, Text(load_recipe(name).description))
    rules = Table("rule", "what must hold", "lifted in", title="Rules", title_justify="left")
    for rule in ALL_RULES:
        rule_id = rule_id_of(rule)
        lifted = "\n".join(f"{lift.since}: {lift.reason}" for lift in LIFTS.get(rule_id, ()))
        rules.add_row(rule_id, Text((rule.__doc__ or "").splitlines()[0]), Text(lifted))
    console = new_console()
    console.print(recipes)
    console.print(rules)
    return OK


_AGENTS = {
    "grid_search": "every point of the sweep, once; order and limits come from [sweep]",
    "tune": "the points that a search chooses, until another is not worth its cost",
}
_REPORTS = {
    "report.json": "everything, for programs",
    "report.html": "for people; also as report.md",
    "junit.xml": "for CI",
    "steps.csv": "every step of every run",
}


def _show_os_error(error: OSError) -> int:
    """Show what the operating system refused, and return the exit code: a path that cannot exist is bad input."""
    where, why = error.filename or "the operating system", error.strerror or error
    if error.filename and is_disk_full(error, Path(where)):
        why = f"{why} ({free_space(Path(where))}); make room and try again"
    elif error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        show_error(f"{where}: {why}; check the path")
        return BadInput.exit_code
    show_error(f"{where}: {why}")
    return ToolFailure.exit_code


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a report must not fail for what a terminal cannot show
    try:
        sys.exit(cli.main(standalone_mode=False) or OK)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        show_error(error.format_message())
        sys.exit(BadInput.exit_code)
    except click.Abort:
        sys.exit(130)
    except MBridgeError as error:
        show_error(str(error))
        sys.exit(error.exit_code)
    except sqlite3.Error as error:
        show_error(f"the journal cannot be read or written: {error}")
        sys.exit(ToolFailure.exit_code)
    except OSError as error:
        sys.exit(_show_os_error(error))
    except Exception:
        traceback.print_exc()
        show_error("this is a bug in mbridge; please report it with the lines above")
        sys.exit(ToolFailure.exit_code)


if __name__ == "__main__":
    main()
