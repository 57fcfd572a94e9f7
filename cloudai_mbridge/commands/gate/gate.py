"""`mbridge gate` and `mbridge compare`."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import click

from cloudai_mbridge.commands.console import (
    STDOUT,
    SteadyConsole,
    error_document,
    new_console,
    print_error,
    print_json,
    render_json,
)
from cloudai_mbridge.commands.gate.baseline import user_name
from cloudai_mbridge.commands.gate.confirm import confirm as run_again
from cloudai_mbridge.commands.options import PATH, run_argument
from cloudai_mbridge.commands.run.watch import observer_for
from cloudai_mbridge.errors import OK, BadInput, NonePromoted, ToolFailure
from cloudai_mbridge.files.documents import json_object
from cloudai_mbridge.files.replace import require_page, require_writable, write_text
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.gate.comparison import (
    COMPARABLE_METRICS,
    ComparisonTable,
    render_comparison,
    render_comparison_csv,
    render_comparison_markdown,
)
from cloudai_mbridge.gate.next_steps import NextSteps, next_steps
from cloudai_mbridge.gate.policy import GatePolicy, load_policy
from cloudai_mbridge.gate.renderings import (
    headline,
    render_gate,
    render_gate_junit,
    render_gate_markdown,
    render_gate_table,
    render_next_steps,
    render_none_promoted_junit,
)
from cloudai_mbridge.gate.runs import read_results, without_dry_runs
from cloudai_mbridge.gate.verdict import GateResult, GateVerdict
from cloudai_mbridge.metrics import PRIMARY
from cloudai_mbridge.plan import ROOT_FILES
from cloudai_mbridge.report.html import render_report_file
from cloudai_mbridge.report.model import plain

_STDOUT = Path(STDOUT)
# Whose change a CI judges: GitHub, GitLab, Jenkins
_AUTHORS = ("GITHUB_ACTOR", "GITLAB_USER_LOGIN", "CHANGE_AUTHOR")
_BUILT_IN = {"name": "built-in", "baseline": "-"}


_DOCUMENT = {**get_type_hints(GateResult), "headline": str, "exit_code": int, "next_steps": NextSteps | None}
GATE_DOCUMENT = json_object(
    "GateDocument", "Result of a gate, its headline, its exit code, and the next steps if it is not green.", **_DOCUMENT
)
COMPARISON_DOCUMENT = json_object(
    "ComparisonDocument",
    "Result of a comparison, with its table of one metric.",
    **_DOCUMENT,
    comparison=ComparisonTable | None,
)


def _output_options(command: Callable[..., int]) -> Callable[..., int]:
    command = click.option("--junit", type=PATH, help="Also write it as JUnit XML.")(command)
    command = click.option("--markdown", type=PATH, help="Also write it for a CI's step summary.")(command)
    return click.option(
        "--json",
        "json_file",
        is_flag=False,
        flag_value=STDOUT,
        type=PATH,
        metavar="[FILE]",
        help="Also write the result as JSON; without FILE, print it alone (docs/scripting.md).",
    )(command)


@click.command()
@run_argument("results", "RUN...", nargs=-1, required=True)
@click.option("--policy", type=PATH, required=True, help="Policy TOML, such as conf/gates/default.toml.")
@click.option("--baseline", type=PATH, help="Baseline file instead of what the policy compares with.")
@click.option("--confirm", type=click.IntRange(1, 100), help="Rerun inconclusive points N times, on other nodes.")
@_output_options
@click.option("--html", type=PATH, help="Also write the page of the first result with the gate on it.")
@click.option("--verbose", is_flag=True, help="Also print every metric of every point.")
def gate(
    results: tuple[Path, ...],
    policy: Path,
    baseline: Path | None,
    confirm: int | None,
    verbose: bool,
    **files: Path | None,
) -> int:
    """Judge the results of runs, taken together, against a baseline or a history; a RUN may be its report.json.

    Exit codes: 0 pass or improvement, 10 regression, 11 not run, 12 not comparable, 13 inconclusive, 14 improvement
    where the policy lets it fail, 17 no baseline has been promoted yet.
    """
    from cloudai_mbridge.gate.run import run_gate  # numpy and scipy, for this command only

    _require_writable(files)
    loaded, as_json = load_policy(policy), files["json_file"] == _STDOUT
    if baseline is not None:
        loaded = replace(loaded, baseline_path=baseline, history_path=None)
    today, num_judgements = datetime.now(UTC).date(), 2 if confirm else 1
    given, skipped = without_dry_runs(results)
    judged = list(given)
    try:
        result = run_gate(given, loaded, today, num_judgements)
    except NonePromoted as error:
        return _show_none_promoted(error, loaded.policy.name, given[0], files, as_json=as_json)
    if confirm:
        try:
            more = _confirm(given, result, confirm, new_console(stderr=as_json))
        except (BadInput, ToolFailure) as error:  # the first verdict stands: a point was inconclusive
            result = result.with_notes([f"the inconclusive points were not run again: {error}"])
        else:
            if more:
                judged += [directory for directory, _ in more]
                result = run_gate(judged, loaded, today, num_judgements)
            result = result.with_notes(note for _, notes in more for note in notes)
    result = result.with_notes(skipped)
    page = str(files["html"] or "")
    author = next(filter(None, map(os.environ.get, _AUTHORS)), None) or user_name()
    steps = next_steps(result, judged, loaded, today, by=author, page=page)
    document = {**_facts(result), "next_steps": steps}
    not_written = _show(document, result, given[0], files, verbose=verbose)
    code = result.exit_code or not_written
    click.echo(f"exit code {code}", err=as_json)
    return code


@click.command()
@run_argument("old", "OLD")
@run_argument("new", "NEW")
@click.option("--policy", type=PATH, help="Policy that supplies metrics and limits; default: built-in.")
@click.option(
    "--metric",
    type=click.Choice(COMPARABLE_METRICS),
    help=f"Metric of the table; default: {PRIMARY}, else the policy's first.",
)
@_output_options
@click.option("--csv", type=PATH, help="Also write the table as CSV.")
@click.option("--verbose", is_flag=True, help="Also print every metric of every point.")
def compare(old: Path, new: Path, policy: Path | None, metric: str | None, verbose: bool, **files: Path | None) -> int:
    """Compare the results of NEW with those of OLD, point by point; the exit code is 0 whatever it finds.

    Either may be a report.json. In the table, ~ is no significant change.
    """
    from cloudai_mbridge.gate.run import compare_reports  # numpy and scipy, for this command only

    _require_writable(files)
    terms = load_policy(policy).policy if policy else GatePolicy.model_validate(_BUILT_IN)
    known = [each.name for each in terms.metrics if each.name in COMPARABLE_METRICS]
    if metric not in (None, *known):
        raise BadInput(f"--metric {metric}: is not in the policy; add it to the [[metrics]] of --policy")
    metric = metric or (PRIMARY if PRIMARY in known else next(iter(known), None))
    if files["csv"] and metric is None:
        raise BadInput("--csv: the policy has no metric for a table; add one of --metric to its [[metrics]]")
    result, table = compare_reports([old], [new], terms, datetime.now(UTC).date(), metric)
    if table is not None and files["json_file"] != _STDOUT:
        new_console().print(render_comparison(table))
    document = {**_facts(result), "next_steps": None, "comparison": table}
    return _show(document, result, new, files, verbose=verbose)


def _require_writable(files: Mapping[str, Path | None]) -> None:
    """Raise BadInput if a file cannot be written, or would replace results."""
    if (path := files["json_file"]) and path.name == ROOT_FILES.report:
        raise BadInput(f"--json: would write to {path}; put --json after the runs, or write --json={STDOUT}")
    for name, path in files.items():
        if path is not None and path != _STDOUT:
            (require_page if name == "html" else require_writable)(path)


def _facts(result: GateResult) -> dict[str, Any]:
    """Return the fields that the documents of gate and comparison share."""
    return {**vars(result), "headline": headline(result), "exit_code": result.exit_code}


def _show(
    document: dict[str, Any], result: GateResult, report: Path, files: Mapping[str, Path | None], *, verbose: bool
) -> int:
    """Print a result and write its files; return 0, or the exit code of a file that could not be written.

    The table of a comparison is printed already.
    """
    as_json, steps, table = files["json_file"] == _STDOUT, document["next_steps"], document.get("comparison")
    form = COMPARISON_DOCUMENT if "comparison" in document else GATE_DOCUMENT
    if as_json:
        print_json(document, form)
    else:
        console = new_console()
        for line, style in render_gate(result, in_table=table is not None):
            console.print_line(line, style)
        if verbose:
            console.print(render_gate_table(result))
        for line in render_next_steps(steps):
            console.print_line(line)
    formats: dict[str, Callable[[], str]] = {
        "json_file": lambda: f"{render_json(document, form)}\n",
        "markdown": lambda: render_gate_markdown(result, steps),
        "junit": lambda: render_gate_junit(result),
        "html": lambda: render_report_file(report, gate=plain(document)),
    }
    if table:
        formats |= {
            "markdown": lambda: f"{render_comparison_markdown(table)}\n{render_gate_markdown(result)}",
            "csv": lambda: render_comparison_csv(table),
        }
    if as_json:
        del formats["json_file"]
    return max(_write(files.get(name), render) for name, render in formats.items())


def _show_none_promoted(
    error: NonePromoted, policy: str, report: Path, files: Mapping[str, Path | None], *, as_json: bool
) -> int:
    """Print the way to a first baseline and write the files that were asked for; return the exit code."""
    text = visible(str(error))
    click.echo(text, err=as_json)
    kind = type(error).__name__
    formats: dict[str, Callable[[], str]] = {
        "markdown": lambda: f"### No baseline yet\n\n    {text}\n",
        "junit": lambda: render_none_promoted_junit(policy, text),
        "html": lambda: render_report_file(report),
        "json_file": lambda: f"{render_json(error_document(kind, error.exit_code, text))}\n",
    }
    if as_json:
        del formats["json_file"]
    code = max(_write(files.get(name), render) for name, render in formats.items()) or error.exit_code
    if as_json:
        print_error(kind, code, text)
    click.echo(f"exit code {code}", err=as_json)
    return code


def _write(path: Path | None, render: Callable[[], str]) -> int:
    """Write a file, if requested. An error is printed, and the verdict stands."""
    try:
        if path is not None:
            write_text(path, render())
    except BadInput as error:
        click.echo(f"error: {path}: not written: {error}", err=True)
        return BadInput.exit_code
    except OSError as error:
        click.echo(f"error: {path}: not written: {error.strerror or error}", err=True)
        return ToolFailure.exit_code
    return OK


def _confirm(
    results: Sequence[Path], result: GateResult, repeats: int, console: SteadyConsole
) -> list[tuple[Path, tuple[str, ...]]]:
    """Rerun every inconclusive point, from the last result that contains it. Return as `confirm`."""
    from cloudai_mbridge.gate.slow_nodes import TOGETHER  # numpy

    wanted = [point.point for point in result.points if point.verdict is GateVerdict.INCONCLUSIVE]
    where = {run.point: path for path in results for run in read_results(path) if run.point in wanted}
    return [
        run_again(
            path if path.is_dir() else path.parent,
            [point for point in wanted if where[point] == path],
            repeats,
            lambda plan, root: observer_for(console, plan, root),
            [name for node in result.slow_nodes for name in node.node.split(TOGETHER)],
        )
        for path in dict.fromkeys(where.values())
    ]
