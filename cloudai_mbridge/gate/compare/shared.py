"""Changes shared by all points or groups of points: compared and tested with the single points, and described."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.compare.groups import Match
from cloudai_mbridge.gate.compare.metric import Tested
from cloudai_mbridge.gate.compare.policy import GatePolicy, MetricPolicy, waiver_for
from cloudai_mbridge.gate.compare.reference import run_values
from cloudai_mbridge.gate.compare.suite import Nights, SharedChange, Suite, SuitePoint, compare_suite
from cloudai_mbridge.gate.compare.verdict import GateVerdict, MetricVerdict, PointVerdict, SlowNode
from cloudai_mbridge.gate.compare.words import percent
from cloudai_mbridge.gate.results.values import METRICS, PRIMARY
from cloudai_mbridge.gate.statistics.slow_nodes import TOGETHER

# Extra weight for all points together, and for all groups, as shares of the points' total weight for a metric
_OF_ALL, _OF_GROUPS = 0.07, 0.03
# All points together show smaller changes than a single point. If the nights of the sides are confounded, the margin of
# a single point applies
_MARGIN_OF_ALL = 0.5
_ALL = "all "
_MOST_NAMES = 8


@dataclass
class SharedTest:
    """A change of all points, or of a group, with its place in the correction."""

    shared: SharedChange
    tested: Tested


@dataclass(frozen=True)
class Suites:
    """Per metric the change shared by the points; without metrics and gates with too few comparable points."""

    by_metric: Mapping[str, Suite]

    def comparison(self, point: str, metric: str) -> Any:
        """Return the comparison of a point given all others; None without one."""
        suite = self.by_metric.get(metric)
        return suite.comparisons.get(point) if suite else None

    @property
    def primary(self) -> Suite | None:
        return self.by_metric.get(PRIMARY)


def compare_suites(matches: Sequence[Match], policy: GatePolicy) -> Suites:
    """Compare all points together, for every metric without a noise floor that follows no other."""
    found = [m for m in matches if not m.why and m.reference is not None and m.runs is not None and m.runs.good]
    groups = _groups(found)
    points = [
        SuitePoint(
            m.point, m.reference.runs, [run_values(run) for run in m.runs.good], groups.get(m.point, frozenset())
        )
        for m in found
        if m.reference is not None and m.runs is not None
    ]
    suites = {
        metric.name: suite
        for metric in policy.metrics
        if metric.follows is None and not METRICS[metric.name].noise_floor
        if (suite := compare_suite(points, metric.name, policy.confidence)) is not None
    }
    return Suites(suites)


def _groups(matches: Sequence[Match]) -> dict[str, frozenset[str]]:
    """Return the properties that points share with some but not all others: test and comparability fields."""
    facts = {m.point: {"test": m.point.partition("/")[0], **_fields(m)} for m in matches}
    values: dict[str, set[str]] = {}
    for fields in facts.values():
        for name, value in fields.items():
            values.setdefault(name, set()).add(value)
    return {
        point: frozenset(f"{name} = {value}" for name, value in fields.items() if len(values[name]) > 1)
        for point, fields in facts.items()
    }


def _fields(match: Match) -> dict[str, str]:
    known = match.reference.comparability if match.reference else {}
    return {name: str(value) for name, value in known.items() if isinstance(value, str | int | float | bool)}


def draft_shared(suites: Suites, metrics: Sequence[MetricPolicy], tested: Sequence[Tested]) -> list[SharedTest]:
    """Return the tests of shared changes, with their shares of the false-alarm rate."""
    drafts = []
    for metric in metrics:
        suite = suites.by_metric.get(metric.name)
        if suite is None:
            continue
        weight = sum(each.policy.weight for each in tested if each.policy.name == metric.name)
        small = 1.0 if suite.nights.are_confounded else _MARGIN_OF_ALL
        of_all = {"weight": weight * _OF_ALL, "margin": metric.margin * small}
        drafts.append(_draft(suite.common, metric.model_copy(update=of_all)))
        share = {"weight": weight * _OF_GROUPS / max(len(suite.groups), 1)}
        drafts += [_draft(group, metric.model_copy(update=share)) for group in suite.groups]
    return drafts


def _draft(shared: SharedChange, policy: MetricPolicy) -> SharedTest:
    limits = -policy.tolerance, policy.tolerance
    num = len(shared.points)
    return SharedTest(shared, Tested(policy, (shared.comparison,), limits, num, num))


def settle_shared(
    tests: Sequence[SharedTest], suites: Suites, policy: GatePolicy, rate: float, today: date
) -> tuple[PointVerdict, ...]:
    """Return the verdicts on shared changes: of all points, and of groups that changed by more."""
    by_name: dict[tuple[str, ...], list[tuple[SharedTest, MetricVerdict]]] = {}
    for test in tests:
        verdict = _settle(test, suites, policy, rate, today)
        is_news = verdict.verdict in (GateVerdict.REGRESSION, GateVerdict.IMPROVEMENT)
        if is_news or (not test.shared.group and verdict.metric == PRIMARY):
            by_name.setdefault((test.shared.group, *test.shared.points), []).append((test, verdict))
    return tuple(_point(found) for found in by_name.values())


def metrics_that_are_worse(shared: Sequence[PointVerdict]) -> dict[str, bool]:
    """Return the metrics in which all points together regress, and whether the regression is waived."""
    whole = [point for point in shared if point.point.startswith(_ALL)]
    return {m.metric: bool(m.waived) for point in whole for m in point.metrics if m.verdict is GateVerdict.REGRESSION}


def _point(found: Sequence[tuple[SharedTest, MetricVerdict]]) -> PointVerdict:
    shared, verdicts = found[0][0].shared, [verdict for _, verdict in found]
    deciding = [verdict.verdict for verdict in verdicts if verdict.decides and not verdict.waived]
    worst_first = [v for v in (GateVerdict.REGRESSION, GateVerdict.IMPROVEMENT) if v in deciding]
    return PointVerdict(name_of(shared), worst_first[0] if worst_first else GateVerdict.PASS, (), tuple(verdicts))


def name_of(shared: SharedChange) -> str:
    """Return the collective name of the points."""
    of = f" with {shared.group}" if shared.group else ""
    return f"{_ALL}{len(shared.points)} points" if not of else f"{counted(len(shared.points), 'point')}{of}"


def _subject_of(shared: SharedChange) -> str:
    if shared.alike == len(shared.points):
        return name_of(shared)
    return f"{shared.alike} of {name_of(shared).removeprefix(_ALL)}"


def _settle(test: SharedTest, suites: Suites, policy: GatePolicy, rate: float, today: date) -> MetricVerdict:
    tested, found = test.tested, test.shared.comparison
    values_are_points = policy.model_copy(update={"min_runs": 1})
    verdict = tested.verdict(values_are_points, rate)
    name = tested.policy.name
    settled = MetricVerdict(
        metric=name,
        verdict=verdict,
        words=_words(test, verdict, suites.by_metric[name], policy),
        unit=METRICS[name].unit,
        decides=verdict in (GateVerdict.REGRESSION, GateVerdict.IMPROVEMENT),
        change=found.change,
        interval=(found.lower, found.upper),
        confidence=policy.confidence,
        p_value=tested.p_worse,
        adjusted_p=tested.adjusted_worse,
    )
    waivers = [waiver_for(policy, point, name, today) for point in test.shared.points]
    if verdict is GateVerdict.REGRESSION and all(
        w and max(map(abs, (found.lower, found.upper))) <= w.up_to for w in waivers
    ):
        return replace(settled, waived=f"waived for all {len(waivers)} of its points")
    return settled


def _words(test: SharedTest, verdict: GateVerdict, suite: Suite, policy: GatePolicy) -> str:
    found, shared = test.shared.comparison, test.shared
    is_worse_larger = 1 in test.tested.worse
    faster, slower = ("faster", "slower") if is_worse_larger else ("higher", "lower")
    if METRICS[test.tested.policy.name].unit == "s":
        how = slower if found.change > 0 else faster
        text = f"{_subject_of(shared)} are {100 * abs(found.change):.2f} % {how}"
    else:
        text = f"{_subject_of(shared)} changed by {percent(found.change)}"
    text += f" ({policy.confidence * 100:.4g} % bounds {percent(found.lower)} and {percent(found.upper)})"
    if shared.group:
        text += f"; the others changed by {percent(shared.rest)}"
    if verdict is GateVerdict.REGRESSION:
        return (
            f"{text}; beyond the margin of {percent(test.tested.policy.margin)}, p = {test.tested.adjusted_worse:.2g}"
        )
    return text if shared.group else f"{text}; {_night_words(suite.nights)}"


def _night_words(nights: Nights) -> str:
    if nights.noise is not None:
        return f"nights differ by {nights.noise:.2%} ({nights.old} against {nights.new}), which limits what is seen"
    if nights.are_confounded:
        return "how nights differ is not known: take the reference from several nights"
    return "what nights differ by is not in these bounds"


def slow_nodes(suites: Suites) -> tuple[SlowNode, ...]:
    """Return the nodes whose effect was removed, the slowest first."""
    if suites.primary is None:
        return ()
    found = [
        SlowNode(name, effect.growth, effect.interval(), effect.runs)
        for name, effect in suites.primary.nodes.slow.items()
    ]
    return tuple(sorted(found, key=lambda node: -node.effect))


def node_notes(nodes: Sequence[SlowNode]) -> list[str]:
    """Return notes on the slow nodes, whose effect is not attributed to the software."""
    return [
        f"{_subject(node.node.split(TOGETHER))} {counted(node.runs, 'run')} {100 * node.effect:.1f} % slower;"
        " that is taken out"
        for node in nodes
    ]


def _subject(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"node {names[0]} makes its"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"one of the nodes {', '.join(names[:_MOST_NAMES])}{more}, of which no run had one alone, makes their"
