"""Read a baseline file. A gate compares with the values of its runs; a file inconsistent with them is refused."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.gate.baseline.model import Baseline, BaselineMetric, BaselinePoint, Value, as_list
from cloudai_mbridge.gate.results.values import METRICS
from cloudai_mbridge.models.loading import validate
from cloudai_mbridge.models.toml_source import read_toml, suggest
from cloudai_mbridge.report.model import comparability_id

BASELINE_VERSION = 1


def load_baseline(path: Path) -> Baseline:
    """Read a baseline and check its consistency.

    BadInput: the file is missing, invalid, or edited by hand.
    """
    source = read_toml(path)
    version = source.data.get("version")
    if version != BASELINE_VERSION or isinstance(version, bool):
        place = source.where(("version",))
        raise BadInput(f"{place}: {version!r} is unknown, {BASELINE_VERSION} is needed; use the mbridge that wrote it")
    baseline = validate(Baseline, source.data, source)
    for i, point in enumerate(baseline.points):
        if mistake := find_mistake(point):
            raise BadInput(f"{source.where(('points', i))}: {point.point!r}: {mistake}")
        if baseline.point(point.point) is not point:
            raise BadInput(f"{source.where(('points', i, 'point'))}: {point.point!r} appears twice; remove one")
    return baseline


_VALUE_DIGITS, _NOISE_DIGITS = 6, 3
_VALUE_SLACK, _NOISE_SLACK = 1e-5, 1e-2  # relative; above the rounding error
_NO_NOISE = 1e-9
_EDITED = "promote again instead of editing"


def summarize_metric(values: Sequence[Value]) -> tuple[Value, float | None]:
    """Return the geometric mean over the runs, rounded, and the noise; None for one run."""
    curves = [as_list(value) for value in values]
    means = [_round(math.exp(fmean(map(math.log, column))), _VALUE_DIGITS) for column in zip(*curves, strict=True)]
    return means if isinstance(values[0], list) else means[0], noise_between(values)


def noise_between(values: Sequence[Value]) -> float | None:
    """Return the relative standard deviation between runs, of the last value for curves; None for one run."""
    if len(values) < 2:
        return None
    noise = stdev(math.log(as_list(value)[-1]) for value in values)
    return 0.0 if noise < _NO_NOISE else _round(noise, _NOISE_DIGITS)


def find_mistake(point: BaselinePoint) -> str:
    """Return the first inconsistency in a point, "" without one."""
    if comparability_id(point.comparability) != point.comparability_id:
        return f"comparability_id is not the digest of its [points.comparability]; {_EDITED}"
    ids = [run.run_id for run in point.runs]
    if len(set(ids)) < len(ids):
        return "a run_id appears twice, and a run counts once; remove one"
    names = [metric.name for metric in point.metrics]
    if len(set(names)) < len(names):
        return "a metric appears twice; remove one"
    if stray := sorted({name for run in point.runs for name in run.values} - set(names)):
        return f"its runs have values of {stray[0]!r}, which is not among its metrics; {_EDITED}"
    return next((mistake for metric in point.metrics if (mistake := _find_metric_mistake(metric, point))), "")


def _find_metric_mistake(metric: BaselineMetric, point: BaselinePoint) -> str:
    known = METRICS.get(metric.name)
    if known is None:
        return f"{metric.name!r} is not a metric; {suggest(metric.name, list(METRICS))}"
    if (metric.unit, metric.direction) != (known.unit, known.direction):
        return f"{metric.name} has unit {known.unit!r} and direction {str(known.direction)!r}; {_EDITED}"
    values = [run.values[metric.name] for run in point.runs if metric.name in run.values]
    if not metric.n == len(values) == len(point.runs):
        return f"{metric.name} says n = {metric.n}, {len(values)} of {len(point.runs)} runs have it; {_EDITED}"
    all_values = (*values, metric.value, metric.anchor or metric.value)
    if len({len(value) if isinstance(value, list) else 0 for value in all_values}) > 1:
        return f"{metric.name} has curves of different lengths; {_EDITED}"
    value, noise = summarize_metric(values)
    if not _are_close(metric.value, value, _VALUE_SLACK):
        return f"{metric.name} has value {metric.value!r}, its runs give {value!r}; {_EDITED}"
    if (metric.noise is None) != (noise is None) or not _are_close(metric.noise or 0.0, noise or 0.0, _NOISE_SLACK):
        return f"{metric.name} has noise {metric.noise!r}, its runs give {noise!r}; {_EDITED}"
    return ""


def _are_close(written: Value, computed: Value, slack: float) -> bool:
    pairs = zip(as_list(written), as_list(computed), strict=True)
    return all(math.isclose(a, b, rel_tol=slack, abs_tol=_NO_NOISE * slack) for a, b in pairs)


def _round(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


_FACTS = ("device", "driver", "cuda", "nccl", "python")
_TABLES: Mapping[str, tuple[str, ...]] = {
    **{"git": ("commit", "dirty"), "benchmark": ("commit", "dirty"), "image": ("name", "digest")}
}
_NAMED = ("packages", "variables")  # tables with arbitrary names
_LONGEST = 1000  # characters
_SEVERAL = "(several values)"
_LOGIN = re.compile(r"[^/@\s]*:[^/@\s]*@(?!sha256:)|(?<=//)[^/@\s]*@")


def summarize_environments(environments: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the facts that all environments share, and a note on the facts that differ. At least one is required."""
    facts = [_facts(environment) for environment in environments]
    common: dict[str, Any] = {}
    differing = []
    for path in dict.fromkeys(path for fact in facts for path in fact):
        if all(fact.get(path) == facts[0].get(path) for fact in facts):
            table = common if len(path) == 1 else common.setdefault(path[0], {})
            table[path[-1]] = facts[0][path]
        else:
            differing.append(".".join(path))
    if all(isinstance(environment.get("variables"), Mapping) for environment in environments):
        several = {path[1]: _SEVERAL for fact in facts for path in fact if path[0] == "variables"}
        common["variables"] = several | common.get("variables", {})
    notes = [f"the runs differ in {', '.join(differing)}, which is left out of the environment"] if differing else []
    return common, notes


def _facts(environment: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the allowed facts by path; anything else in a report is dropped."""
    found: dict[tuple[str, ...], Any] = {(name,): environment.get(name) for name in _FACTS}
    for table, names in _TABLES.items():
        found |= {(table, name): _mapping(environment.get(table)).get(name) for name in names}
    for table in _NAMED:
        named = _mapping(environment.get(table))
        found |= {(table, str(name)): named[name] for name in sorted(named, key=str)}
    found = {path: _clean(value) for path, value in found.items() if _is_fact(value)}
    repositories = environment.get("repositories")
    if isinstance(repositories, list) and repositories:
        found[("repositories",)] = [
            {name: _clean(item[name]) for name in ("url", "commit") if _is_fact(item.get(name))}
            for item in map(_mapping, repositories)
        ]
    return found


def _is_fact(value: Any) -> bool:
    """Return whether a value is a number or a short text; searching a long text for logins could take very long."""
    return len(value) <= _LONGEST if isinstance(value, str) else isinstance(value, int | float)


def _clean(value: Any) -> Any:
    """Remove user and password from an address."""
    return _LOGIN.sub("", value) if isinstance(value, str) else value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
