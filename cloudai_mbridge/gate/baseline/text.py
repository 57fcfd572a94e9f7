"""Write a baseline so that a promotion is a diff that can be reviewed: sorted, one fact, metric or run per line.

`launch.toml_text` gives every nested table lines of its own, which would spread a run over many. Characters that do not
print are escaped, so that no name can make a diff look like another one.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.gate.baseline.model import Baseline, BaselineMetric, BaselinePoint, BaselineRun, value_to_toml
from cloudai_mbridge.gate.results.values import METRICS

HEADER = "# Written by `mbridge baseline promote`. Change it with that, and review the diff.\n"
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def render_baseline(baseline: Baseline) -> str:
    """Return the file's text: equal baselines give equal texts.

    Raises:
        BadInput: a text holds half of a surrogate pair, which no file can hold.
    """
    points = sorted(baseline.points, key=lambda point: point.point)
    blocks = [f"{HEADER}version = {baseline.version}\n", *("\n".join(_point_lines(point)) + "\n" for point in points)]
    return "\n".join(blocks)


def quote(text: str) -> str:
    """Return a TOML string in which everything that does not print is escaped."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{text!a}: holds a lone surrogate, which cannot be written as UTF-8; rename it") from None
    return "".join(c if c.isprintable() else _escape(c) for c in json.dumps(text, ensure_ascii=False))


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _point_lines(point: BaselinePoint) -> Iterator[str]:
    yield "[[points]]"
    head = point.model_dump(exclude={"metrics", "runs", "comparability", "environment"}, exclude_none=True)
    if not head["accepted"]:
        del head["accepted"]
    yield from _lines(head)
    order = list(METRICS)
    metrics = sorted(point.metrics, key=lambda metric: order.index(metric.name))
    yield from _array("metrics", [_metric(metric) for metric in metrics])
    runs = sorted(point.runs, key=lambda run: (run.ended_at, run.run_id))
    yield from _array("runs", [_run(run) for run in runs])
    yield from _table("points.comparability", {k: value_to_toml(v) for k, v in point.comparability.items()})
    if point.environment:
        yield from _table("points.environment", point.environment)


def _metric(metric: BaselineMetric) -> Mapping[str, Any]:
    return metric.model_dump(mode="json", exclude_none=True)


def _run(run: BaselineRun) -> Mapping[str, Any]:
    values = {name: run.values[name] for name in METRICS if name in run.values}
    return {**run.model_dump(exclude={"values"}), "values": values}


def _array(name: str, items: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"{name} = ["
    yield from (f"  {_inline(item)}," for item in items)
    yield "]"


def _table(name: str, facts: Mapping[str, Any]) -> Iterator[str]:
    """Write a table, then its tables, of which all but { json = ... } get lines of their own."""
    tables = {key: value for key, value in facts.items() if isinstance(value, dict) and list(value) != ["json"]}
    yield ""
    yield f"[{name}]"
    yield from _lines({key: facts[key] for key in sorted(facts) if key not in tables})
    for key in sorted(tables):
        yield from _table(f"{name}.{_key(key)}", tables[key])


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    return (f"{_key(name)} = {_inline(value)}" for name, value in facts.items())


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else quote(name)


def _inline(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return quote(value)
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(map(_inline, value))}]"
        case dict():
            pairs = ", ".join(f"{_key(name)} = {_inline(item)}" for name, item in value.items())
            return f"{{ {pairs} }}" if pairs else "{}"
        case _:
            raise TypeError(f"{type(value).__name__} has no place in a baseline")
