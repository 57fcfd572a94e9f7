"""`mbridge sweep plan` and `mbridge sweep explain`."""

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.commands.console import counting, new_console, print_json
from cloudai_mbridge.commands.options import FAILED_OF, FLOPS_FORMULA, JSON, ONLY, Number, scenario_options
from cloudai_mbridge.commands.plan.sweep_documents import EXPLANATION, SWEEP_PLAN, as_explanation, as_test, status_of
from cloudai_mbridge.constraints import Lifted, NotEvaluated, RuleSet, Violation
from cloudai_mbridge.constraints.engine import RULES
from cloudai_mbridge.constraints.rule_docs import details_hint
from cloudai_mbridge.constraints.upstream import rule_id
from cloudai_mbridge.errors import OK, POINTS_FAILED, BadInput, counted
from cloudai_mbridge.estimate.hardware import calibration_note
from cloudai_mbridge.estimate.headline import DEFAULT_LIMIT, Headline, MemoryLimit
from cloudai_mbridge.files.text import label, labels, readable
from cloudai_mbridge.megatron_bridge.presets import describe, with_loop_preset, with_preset
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.loading import LoadedScenario, LoadedTest, Warn, load_scenario, load_system, naming_file
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.toml_source import suggest
from cloudai_mbridge.pipeline import selection_of
from cloudai_mbridge.plan.select import PointChoice, among
from cloudai_mbridge.plan.walk import PointWalk, SweepSummary, summarize_test
from cloudai_mbridge.report.rows import spreadsheet_text
from cloudai_mbridge.sweep.checked import CheckedPoint, checked_points
from cloudai_mbridge.sweep.pinned import because, software_note
from cloudai_mbridge.training.flops import NEW, Formula

_MOST_LABELS, _BY_TIME = 8, "time"
_SHARE = Number(min=0, min_open=True)
_CSV = (
    *("test", "point", "status", "peak_memory_gib", "memory_share", "step_time_s", "tokens_per_s_per_gpu"),
    *("tflops_per_gpu", "mfu", "gpu_hours", "cost", "rules", "why"),
)


@click.group()
def sweep() -> None:
    """Look at the points of a scenario without writing or running anything."""


_MEMORY_SHARE = click.option(
    "--memory-share", type=_SHARE, help="Hold back points predicted to need more of the GPU; default: 0.9."
)
_INCLUDE_OOM_RISK = click.option("--include-oom-risk", is_flag=True, help="Hold no point back for its memory.")


@sweep.command("plan")
@scenario_options(output_dir=False)
@click.option("--show", default=10, show_default=True, type=click.IntRange(min=0), help="Points to list of each test.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "summary", "csv"]),
    default="table",
    show_default=True,
    help="Show counts with the first points, counts alone, or every point.",
)
@_MEMORY_SHARE
@_INCLUDE_OOM_RISK
@click.option(
    "--order",
    type=click.Choice(["time", "grid", "informative"]),
    help="Of the points; default: the sweep's, and the fastest by prediction are shown.",
)
@FLOPS_FORMULA
@ONLY
@FAILED_OF
@JSON
def sweep_plan(
    show: int,
    form: str,
    memory_share: float | None,
    include_oom_risk: bool,
    order: str | None,
    formula: Formula,
    rules: RuleSet,
    only: tuple[str, ...],
    failed_of: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Count the points of every test, and estimate what they need: memory, time, GPU-hours, cost (docs/estimate.md)."""
    if form == "csv" and as_json:
        raise BadInput("--json: is not for --format csv; leave one of them out")
    if form == "csv" and order == _BY_TIME:
        raise BadInput("--order time: is not for --format csv, which has every point as it comes; sort by step_time_s")
    is_by_time = order == _BY_TIME
    selection = selection_of(only, failed_of)
    system, loaded = _load(**options)
    plans: Iterable[PointWalk] = (
        _walk(test, system, rules, memory_share, include_oom_risk, None if is_by_time else order, formula)
        for test in loaded.tests
    )
    choice = None
    if selection:
        plans = list(plans)
        choice = among(selection, loaded.scenario.name, {plan.test_id: plan.axes for plan in plans})
        for plan in plans:
            plan.choice = choice
    if form == "csv":
        return _write_csv(list(plans if sys.stdout.isatty() else _watched(plans)), choice)
    summaries: Iterable[SweepSummary] = (
        summarize_test(
            plan,
            show if form == "table" else 0,
            is_by_time=is_by_time or (order is None and plan.limits.order != "informative"),
        )
        for plan in _watched(plans)
    )
    if choice is not None:  # nothing is printed before the choice has been checked
        summaries = list(summaries)
        choice.check()
    totals = list(summaries) if as_json else _show(summaries, system, with_points=form == "table")
    if as_json:
        tests = [as_test(each, list(_notes(each))) for each in totals]
        print_json({"calibration": calibration_note(system), "tests": tests}, SWEEP_PLAN)
    return OK if any(summary.would_run for summary in totals) else POINTS_FAILED


def _watched(plans: Iterable[PointWalk]) -> Iterator[PointWalk]:
    """Yield the plans, each with a count of its points on a terminal."""
    for plan in plans:
        plan.watched = counting(plan.test_id)
        yield plan


def _walk(
    test: LoadedTest,
    system: System,
    rules: RuleSet,
    memory_share: float | None,
    include_oom_risk: bool,
    order: str | None = None,
    formula: Formula = NEW,
) -> PointWalk:
    """Return the points of a test. memory_share, order: None takes the sweep's, or the default."""
    share = test.definition.sweep.memory_share if memory_share is None else memory_share
    limit = DEFAULT_LIMIT if share is None else MemoryLimit(share)
    with naming_file(test):
        return PointWalk(test, system, rules, None if include_oom_risk else limit, order, formula)


def _show(summaries: Iterable[SweepSummary], system: System, *, with_points: bool) -> list[SweepSummary]:
    """Print and return the summaries, each as soon as it is there; the totals come last."""
    console, found = new_console(), list[SweepSummary]()
    if note := calibration_note(system):
        console.print_line(note)
    for summary in summaries:
        found.append(summary)
        axes = " x ".join(f"{name}({count})" for name, count in summary.axes.items()) or "no axes"
        console.print_line(f"{summary.test_id}: {axes}")
        rejected = summary.points - summary.accepted - summary.held_back
        held = f", {summary.held_back} held back" if summary.held_back else ""
        console.print(f"  {counted(summary.points, 'point')}, {summary.accepted} accepted, {rejected} rejected{held}")
        for line in filter(None, (*_notes(summary), details_hint(summary.rules))):
            console.print_line(f"  {line}")
        if not with_points:
            continue
        known = [look.headline for look in summary.examples if look.headline is not None]
        names, shared = labels([look.coordinates for look in summary.examples])
        has_times = any(each.step_time_s is not None for each in known)
        if (intro := _intro(summary, shared, is_by_time=summary.is_by_time and has_times)) and known:
            console.print_line(f"  {intro}:")
        if has_times or any(each.peak_memory_gib is not None for each in known):
            console.print(_table(summary.examples, names, has_rates=_differ_in_work(known)))
        else:
            for name in names:
                console.print_line(f"  accepted {name}")
        if (more := summary.accepted - summary.left_out - len(summary.examples)) > 0:
            console.print(f"  ... and {more} more")
        names, shared = labels([look.coordinates for look, _ in summary.held_examples])
        if shared:
            console.print_line(f"  held back, of {shared}:")
        for name, (look, terms) in zip(names, summary.held_examples, strict=True):
            console.print_line(f"  held back {name}: {_why_held_back(look, terms)}")
        if (more := summary.held_back - len(summary.held_examples)) > 0:
            console.print(f"  ... and {more} more held back")
    if len(found) > 1 and any(summary.predicted for summary in found):
        hours, points = (sum(getattr(each, name) for each in found) for name in ("gpu_hours", "predicted"))
        costs: dict[str, float] = {}
        for each in found:
            if each.cost is not None:
                costs[each.currency] = costs.get(each.currency, 0.0) + each.cost
        cost = "".join(f", {amount:.2f} {currency}" for currency, amount in costs.items())
        console.print_line(f"all tests: {counted(points, 'point')}, {readable(hours)} GPU-hours of steps{cost}")
    return found


def _load(
    system_config: Path, test_scenario: Path, tests_dir: Path | None, on_unknown_arg: Warn | None
) -> tuple[System, LoadedScenario]:
    system = load_system(system_config)
    return system, load_scenario(test_scenario, tests_dir, on_unknown_arg, hooks=None)


def _notes(summary: SweepSummary) -> Iterator[str]:
    yield from summary.fill_in
    for rule, count in sorted(summary.rules.items()):
        yield f"{rule} rejects {count}{because(summary.causes, rule, count)}"
    yield from summary.lifted_notes()
    yield from (software_note(text, count) for text, count in summary.unknown.items())
    if summary.held_back and (limit := summary.memory_limit):
        share = f"{limit.share:g} of the GPU's memory"
        yield f"held back: predicted to need over {share}; --include-oom-risk plans them"
        if not summary.run_holds_back:
            yield "mbridge run would not hold them back: set [sweep] memory_share for that"
    if summary.within_limits < summary.accepted:
        first = f"the first {summary.within_limits}" if summary.within_limits else "none"
        yield f"within the sweep's limits: {first}; the first point that does not fit ends the sweep"
    if summary.budget_note:
        yield summary.budget_note
    if summary.left_out:
        yield f"left out, as not chosen: {counted(summary.left_out, 'accepted point')}"
    if summary.predicted:
        yield f"{counted(summary.predicted, 'point')}: {_price(summary)}"
    for why, count in summary.why.items():
        yield f"not predicted for {count}: {why}"
    if summary.not_considered:
        yield f"set, but not considered by the predictions: {', '.join(summary.not_considered)}"


def _price(summary: SweepSummary) -> str:
    if summary.cost is None:
        return f"{readable(summary.gpu_hours)} GPU-hours of steps, no cost: {summary.why_no_cost}"
    cost = f"{summary.cost:.2f} {summary.currency}"
    if summary.priced < summary.predicted:
        cost += f" for {summary.priced} of {summary.predicted} points ({summary.why_no_cost})"
    return f"{readable(summary.gpu_hours)} GPU-hours of steps, {cost}"


def _why_held_back(look: CheckedPoint, terms: str) -> str:
    headline = look.headline
    if headline is not None and headline.memory_share is None:
        return f"its memory cannot be predicted: {'; '.join(headline.why) or 'the memory of the GPU is not known'}"
    return f"{_memory(look)}: {terms}"


def _memory(look: CheckedPoint) -> str:
    headline = look.headline
    if headline is None or headline.peak_memory_gib is None:
        return "-"
    share = "" if headline.memory_share is None else f", states and activations {headline.memory_share:.0%}"
    where = f" on stage {headline.worst_stage}{share}"
    if headline.gpu_memory_gib:
        return f"{headline.peak_memory_gib:.1f} of {headline.gpu_memory_gib:.0f} GiB{where}"
    return f"{headline.peak_memory_gib * 1024:.1f} MiB{where}"


def _differ_in_work(known: Sequence[Headline]) -> bool:
    """Return whether the steps of points are of different numbers of tokens or GPUs: their times compare to nothing."""
    work = {
        (each.num_gpus, round(each.tokens_per_s_per_gpu * each.step_time_s))
        for each in known
        if each.tokens_per_s_per_gpu is not None and each.step_time_s is not None
    }
    return len(work) > 1


def _intro(summary: SweepSummary, shared: str, *, is_by_time: bool) -> str:
    """Return the words before the points that are shown. shared: coordinates that all of them have."""
    known = [look.headline for look in summary.examples if look.headline is not None]
    by = "by predicted tokens/s/GPU" if _differ_in_work(known) else "by predicted step time"
    return ", ".join([*[f"fastest first, {by}"] * is_by_time, *[f"each with {shared}"] * bool(shared)])


def _table(looks: list[CheckedPoint], names: Sequence[str], *, has_rates: bool) -> Table:
    rates = ["tokens/s/GPU"] * has_rates
    table = Table("accepted", "memory", "step time, s", *rates, "TFLOP/s/GPU", "MFU", "GPU-hours", "cost", "")
    for look, name in zip(looks, names, strict=True):
        if (headline := look.headline) is not None:
            table.add_row(
                Text(name, overflow="fold"),
                _memory(look),
                _number(headline.step_time_s, ".4g"),
                *[_number(headline.tokens_per_s_per_gpu, ".0f")] * has_rates,
                _number(headline.tflops_per_gpu, ".0f"),
                _number(headline.mfu, ".1%"),
                "-" if look.gpu_hours is None else readable(look.gpu_hours),
                _number(look.cost, ".2f"),
                "" if look.is_run else "over the limits",
            )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _write_csv(tests: list[PointWalk], choice: PointChoice | None) -> int:
    """Write each point immediately, also rejected points, without keeping any. Every axis of any test is a column.

    choice: the points to run; nothing is printed before it has been checked.
    """
    file = sys.stdout if choice is None else io.StringIO()
    writer, num_run = csv.writer(file, lineterminator="\n"), 0
    axes = list(dict.fromkeys(name for plan in tests for name in plan.axes))
    writer.writerow((*_CSV[:2], *(f"axis.{name}" if name in _CSV else name for name in axes), *_CSV[2:]))
    for plan in tests:
        for look in plan.points():
            num_run += look.is_run and not look.left_out
            values = (look.coordinates.get(name) for name in axes)
            coordinates = ("" if value is None else _cell(value) for value in values)
            writer.writerow((plan.test_id, look.label, *coordinates, *_cells(look, plan)))
    if choice is not None and isinstance(file, io.StringIO):
        choice.check()
        sys.stdout.write(file.getvalue())
    return OK if num_run else POINTS_FAILED


def _cell(value: Any) -> str:
    return spreadsheet_text(value) if isinstance(value, str) else json.dumps(value)


def _cells(look: CheckedPoint, plan: PointWalk) -> Iterator[Any]:
    headline = look.headline
    if headline is None:
        yield from (status_of(look), *[""] * 8)
        yield " ".join(sorted({violation.rule_id for violation in look.violations}))
        yield "; ".join(map(str, look.violations))
        return
    yield status_of(look)
    values = (
        *(headline.peak_memory_gib, headline.memory_share, headline.step_time_s, headline.tokens_per_s_per_gpu),
        *(headline.tflops_per_gpu, headline.mfu, look.gpu_hours, look.cost),
    )
    yield from ("" if value is None else f"{value:.6g}" for value in values)
    yield ""
    reasons = [f"beyond {look.beyond}"] if not look.is_held_back and not look.is_run else []
    if look.is_held_back and plan.memory_limit:  # the terms of the memory would cost an estimate of every point
        reasons.append(f"memory: {_memory(look)}; the limit is {plan.memory_limit.share:g} of the GPU's memory")
    if look.left_out:
        reasons.append(f"left out: {look.left_out}")
    yield "; ".join([*reasons, *headline.why])


@sweep.command("explain")
@scenario_options(output_dir=False)
@_MEMORY_SHARE
@_INCLUDE_OOM_RISK
@click.argument("test_id")
@click.argument("point")
@JSON
def sweep_explain(
    test_id: str,
    point: str,
    memory_share: float | None,
    include_oom_risk: bool,
    rules: RuleSet,
    as_json: bool,
    **options: Any,
) -> int:
    """Explain why one POINT of a test would run or not: its label, or coordinates such as tp=2,pp=4."""
    system, loaded = _load(**options)
    named = {test.run.id: test for test in loaded.tests}
    if test_id not in named:
        raise BadInput(f"{options['test_scenario']}: no test {test_id!r}; {suggest(test_id, list(named))}")
    plan = _walk(named[test_id], system, rules, memory_share, include_oom_risk)
    found = _find(plan, system, point)
    args = found.sweep.point(found.coordinates).args
    preset, is_embedded = plan.pinned.preset_of(args), args.launcher is Launcher.EMBEDDED
    resolved = (with_loop_preset if is_embedded else with_preset)(args, preset)
    fill_in = describe(resolved, frozenset() if is_embedded else plan.pinned.overridden)
    plan.preview(found)
    decision, console = status_of(found), new_console()
    if as_json:
        is_known = found.headline is not None and found.headline.peak_memory_gib is not None
        print_json(as_explanation(test_id, found, fill_in, plan.terms(found) if is_known else ""), EXPLANATION)
        return OK if decision == "accepted" else POINTS_FAILED
    console.print_line(f"{test_id}/{found.label}: {decision}")
    coordinates = ", ".join(f"{name} = {json.dumps(value)}" for name, value in found.coordinates.items())
    console.print_line(f"  {coordinates or 'no axes'}")
    if fill_in:
        console.print_line(f"  filled in by {fill_in}")
    for style, line in _verdicts(found):
        console.print_line(f"  {line}", style=style)
    for line in _estimate(plan, found):
        console.print_line(f"  {line}", style="yellow" if found.is_held_back else "")
    if hint := details_hint(violation.rule_id for violation in found.violations):
        console.print_line(f"  {hint}")
    return OK if decision == "accepted" else POINTS_FAILED


def _find(plan: PointWalk, system: System, wanted: str) -> CheckedPoint:
    """Return the point with this label, or coordinates such as "tp=2,pp=4"; BadInput: none, or several, match."""
    coordinates = dict(part.strip().partition("=")[::2] for part in wanted.split(",")) if "=" in wanted else {}
    where, axes = f"test {plan.test_id!r}", plan.sweep.grid.names
    for name in coordinates:
        if name not in axes:
            raise BadInput(f"{where}: {name!r} is not an axis; axes are {', '.join(axes) or 'none'}")
    points = checked_points(plan.sweep, system, plan.pinned)
    found = [point for point in points if _is_wanted(point, wanted, coordinates)]
    if not found:
        raise BadInput(f"{where}: no point {wanted!r}; `mbridge sweep plan` lists labels and axes")
    if len(found) > 1:
        open_axes = [name for name in axes if name not in coordinates]
        labels = ", ".join(label(point.coordinates) for point in found[:_MOST_LABELS])
        more = f" and {len(found) - _MOST_LABELS} more" if len(found) > _MOST_LABELS else ""
        raise BadInput(
            f"{where}: {wanted!r} are the coordinates of {len(found)} points, {labels}{more};"
            f" also give {', '.join(open_axes)}, or give a label"
        )
    return found[0]


def _is_wanted(point: CheckedPoint, wanted: str, coordinates: dict[str, str]) -> bool:
    """Return whether a point matches the user's text; values are in Python's or in TOML's spelling."""
    if not coordinates:
        return label(point.coordinates) == wanted
    values = ((point.coordinates.get(name), text.strip()) for name, text in coordinates.items())
    return all(text in (str(value), json.dumps(value)) for value, text in values)


def _verdicts(found: CheckedPoint) -> Iterator[tuple[str, str]]:
    """Yield a style and a line for every rule with a finding; the other rules share the last line."""
    answers = {answer.rule_id: answer for answer in found.answers}
    verdicts = [(rule_id(rule), answers.get(rule_id(rule))) for rule in RULES]
    yield from (("yellow", str(verdict)) for _, verdict in verdicts if isinstance(verdict, Violation))
    yield from (("cyan", str(verdict)) for _, verdict in verdicts if isinstance(verdict, Lifted))
    for name, verdict in verdicts:
        if isinstance(verdict, NotEvaluated):
            yield "dim", f"{name} not evaluated: {verdict.missing} is missing"
    if holding := [name for name, verdict in verdicts if verdict is None]:
        yield "", f"{counted(len(holding), 'rule')} hold: {' '.join(holding)}"


def _estimate(plan: PointWalk, look: CheckedPoint) -> Iterator[str]:
    """Yield the predictions for a point that breaks no rule, and an explanation of its memory."""
    headline, limit = look.headline, plan.memory_limit
    if headline is None:
        yield "memory is not judged: only points that break no rule are estimated"
        return
    if headline.peak_memory_gib is None:
        yield f"memory is not known: {'; '.join(headline.why) or 'the memory of the GPU is not known'}"
    else:
        yield f"memory: {_memory(look)}: {plan.terms(look)}"
    if look.is_held_back and limit:
        yield f"held back: it may need at most {limit.share:g} of the GPU's memory; --memory-share sets another share"
        if plan.limits.memory_share is None:
            yield "mbridge run would not hold it back: set [sweep] memory_share for that"
    if headline.step_time_s is not None:
        yield f"step time: {headline.step_time_s:.4g} s, {_number(headline.tflops_per_gpu, '.0f')} TFLOP/s per GPU"
