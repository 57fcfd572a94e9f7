"""A gate's result as sentences: one for the whole, one for each point that is not green."""

from collections import Counter
from collections.abc import Mapping, Sequence

from cloudai_mbridge.errors import counted
from cloudai_mbridge.files.text import label
from cloudai_mbridge.gate.compare.verdict import GREEN, GateResult, GateVerdict, MetricVerdict, PointVerdict
from cloudai_mbridge.gate.results.values import PRIMARY

INCOMPLETE = "incomplete"
_OF_SEVERAL: Mapping[GateVerdict, str] = {
    GateVerdict.NOT_COMPARABLE: "are not comparable, such as",
    GateVerdict.INCONCLUSIVE: "are not decided, such as",
}


def headline(result: GateResult) -> str:
    """Return the headline: the worst finding, and the number of similar points."""
    names = _names(result.points)
    rows = [point for point in result.rows if point.verdict is result.verdict]
    if not result.points:
        return "there is no point to judge"
    if result.verdict is GateVerdict.PASS:
        return _all_pass(result)
    together = [point for point in rows if point in result.shared]
    if together:
        return sentence(together[0], together[0].point)
    worst = max(rows, key=_size, default=result.points[0])
    text = sentence(worst, names[worst.point])
    return text if len(rows) <= 1 else f"{len(rows)} of {counted(len(result.points), 'point')} {_kind(rows)} {text}"


def findings(result: GateResult) -> list[tuple[PointVerdict, str]]:
    """Return shared findings and every point that is not green, the worst first, each with its sentence."""
    names = _names(result.points)
    order = list(GateVerdict)
    red = sorted(
        (row for row in result.rows if row.verdict not in GREEN),
        key=lambda row: (row not in result.shared, order.index(row.verdict), -_size(row)),
    )
    return [(row, sentence(row, names.get(row.point, row.point))) for row in red]


def sentence(point: PointVerdict, name: str) -> str:
    """Explain a point's verdict. name: of the point, or of the points that share it."""
    metric = _decisive(point)
    if point.words and (metric is None or point.verdict in (GateVerdict.NOT_RUN, GateVerdict.NOT_COMPARABLE)):
        return f"{name}: {'; '.join(point.words)}"
    if metric is None:
        return f"{name}: {point.verdict}"
    if point.verdict is GateVerdict.INCONCLUSIVE:
        return f"{name}: {metric.metric} is not decided: {metric.words.partition('); ')[2] or metric.words}"
    if metric.change is None or point.verdict in (GateVerdict.NOT_RUN, GateVerdict.NOT_COMPARABLE):
        return f"{name}: {metric.metric}: {metric.words}"
    if metric.baseline is None or metric.value is None:  # only the change of a shared finding is known
        own = metric.words.removeprefix(name)
        return f"{name}: {own}" if own == metric.words else f"{name}{own.partition(' (')[0]}"
    values = f"{metric.baseline:.4g} -> {metric.value:.4g} {metric.unit}".rstrip()
    more, less = ("slow", "fast") if metric.metric == PRIMARY else ("high", "low")
    subject = name if metric.metric == PRIMARY else f"{metric.metric} of {name}"
    return f"{subject} is {_amount(metric.change, more, less)}: {values}"


def _amount(change: float, more: str, less: str) -> str:
    """Return "9.1 % slower"; for a factor of two or more, "2.5 times as slow". more, less: adjectives."""
    if change >= 1:
        return f"{1 + change:.2g} times as {more}" if change < 99 else f"{1 + change:.0f} times as {more}"
    return f"{100 * abs(change):.1f} % {more if change > 0 else less}er"


def verdict_text(point: PointVerdict) -> str:
    """Name a verdict: a point with some good runs is incomplete, not "not run"."""
    return INCOMPLETE if point.verdict is GateVerdict.NOT_RUN and point.runs else str(point.verdict)


def conclusion(result: GateResult) -> str:
    """Return the number of points by verdict, and the error rate."""
    counts = Counter(verdict_text(point) for point in result.points)
    points = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no points"
    red = {verdict_text(point) for point in result.rows if point.verdict is result.verdict}
    verdict = INCOMPLETE if red == {INCOMPLETE} else str(result.verdict)
    return f"{verdict.upper()}: {points}; false-alarm rate at most {result.false_alarm_rate:.1%}"


def _all_pass(result: GateResult) -> str:
    metrics = [metric for point in result.rows for metric in point.metrics]
    worse = "slower" if any(metric.metric == PRIMARY for metric in metrics) else "worse"
    where = result.reference.partition(" ")[0]
    reference = f"the {where}" if where in ("baseline", "history") else result.reference
    waived = "; a regression is waived" if any(metric.waived for metric in metrics) else ""
    return f"no point is {worse} than {reference} ({counted(len(result.points), 'point')}){waived}"


def _kind(points: Sequence[PointVerdict]) -> str:
    """Return the predicate of a sentence about several points with one verdict."""
    metrics = [_decisive(point) for point in points]
    is_time = all(metric is not None and metric.metric == PRIMARY for metric in metrics)
    match points[0].verdict:
        case GateVerdict.REGRESSION:
            return f"are {'slower' if is_time else 'worse'}; the worst:"
        case GateVerdict.IMPROVEMENT:
            return f"are {'faster' if is_time else 'better'}; the best:"
        case GateVerdict.NOT_RUN:
            is_partial = any(point.runs for point in points)
            return f"are {INCOMPLETE}, such as" if is_partial else "have no result, such as"
        case _:
            return _OF_SEVERAL[points[0].verdict]


def decisive_metrics(point: PointVerdict) -> list[MetricVerdict]:
    """Return the metrics that determine a point's verdict."""
    return [m for m in point.metrics if m.verdict is point.verdict and m.decides and not m.waived]


def _decisive(point: PointVerdict) -> MetricVerdict | None:
    return next(iter(decisive_metrics(point)), None)


def _size(point: PointVerdict) -> float:
    metric = _decisive(point)
    return abs(metric.change) if metric and metric.change is not None else 0.0


def _names(points: Sequence[PointVerdict]) -> dict[str, str]:
    """Return the points' names, test/label; a test's only point without coordinates is the test."""
    tests = Counter(point.point.partition("/")[0] for point in points)
    ends = f"/{label({})}"
    return {
        point.point: test if point.point == f"{test}{ends}" and tests[test] == 1 else point.point
        for point in points
        for test in [point.point.partition("/")[0]]
    }
