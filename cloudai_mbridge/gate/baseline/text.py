"""Write a baseline so that a promotion is a diff that can be reviewed: sorted, one fact, metric or run per line."""

from collections.abc import Mapping
from typing import Any

import tomlkit
from tomlkit.items import Table

from cloudai_mbridge.files.toml_text import inline, one_per_line, render_toml
from cloudai_mbridge.gate.baseline.model import Baseline, BaselinePoint, BaselineRun, value_to_toml
from cloudai_mbridge.gate.results.values import METRICS

_HEADER = "Written by `mbridge baseline promote`. Change it with that, and review the diff."


def render_baseline(baseline: Baseline) -> str:
    """Return the file's text: equal baselines give equal texts.

    Raises:
        BadInput: a text holds half of a surrogate pair, which no file can hold.
    """
    document = tomlkit.document()
    document.add(tomlkit.comment(_HEADER))
    document.add("version", tomlkit.item(baseline.version))
    points = tomlkit.aot()
    for point in sorted(baseline.points, key=lambda point: point.point):
        points.append(_point(point))
    document.add("points", points)
    return render_toml(document)


def _point(point: BaselinePoint) -> Table:
    head = point.model_dump(exclude={"metrics", "runs", "comparability", "environment"}, exclude_none=True)
    if not point.accepted:
        del head["accepted"]
    order = list(METRICS)
    metrics = sorted(point.metrics, key=lambda metric: order.index(metric.name))
    runs = sorted(point.runs, key=lambda run: (run.ended_at, run.run_id))
    table = tomlkit.table()
    table.trivia.indent = "\n"
    table.update(head)
    table.add("metrics", one_per_line(metric.model_dump(mode="json", exclude_none=True) for metric in metrics))
    table.add("runs", one_per_line(map(_run, runs)))
    table.add("comparability", _table({name: value_to_toml(value) for name, value in point.comparability.items()}))
    if point.environment:
        table.add("environment", _table(point.environment))
    return table


def _run(run: BaselineRun) -> Mapping[str, Any]:
    values = {name: run.values[name] for name in METRICS if name in run.values}
    return {**run.model_dump(exclude={"values"}), "values": values}


def _table(facts: Mapping[str, Any]) -> Table:
    """Return a sorted table; its tables get lines of their own, all but { json = ... }."""
    table = tomlkit.table()
    table.trivia.indent = "\n"
    for name, value in sorted(facts.items()):
        is_table = isinstance(value, dict) and list(value) != ["json"]
        table.add(name, _table(value) if is_table else inline(value))
    return table
