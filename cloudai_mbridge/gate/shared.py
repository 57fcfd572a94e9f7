"""Changes shared by all points or groups of points: compared and tested with the single points, and described."""

from collections.abc import Mapping, Sequence
from datetime import date

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.metric import Tested
from cloudai_mbridge.gate.policy import GatePolicy, MetricPolicy, waiver_for
from cloudai_mbridge.gate.runs import METRICS, PointRuns
from cloudai_mbridge.gate.slow_nodes import TOGETHER
from cloudai_mbridge.gate.suite import SharedChange, Suite, compare_suite
from cloudai_mbridge.gate.verdict import GateVerdict, MetricVerdict, PointVerdict, SlowNode, percent
from cloudai_mbridge.metrics import PRIMARY

# Extra weight for all points together, and for all groups, as shares of the points' total weight for a metric
_OF_ALL, _OF_GROUPS = 0.07, 0.03
# All points together show smaller changes than a single point. If the nights of the sides are confounded, the margin of
# a single point applies
_MARGIN_OF_ALL = 0.5
_ALL = "all "
_MOST_NAMES = 8
_NEWS = (GateVerdict.REGRESSION, GateVerdict.IMPROVEMENT)

SharedTest = tuple[SharedChange, Tested]


def compare_suites(points: Sequence[PointRuns], policy: GatePolicy) -> dict[str, Suite]:
    """Compare all comparable points together, for every metric without a noise floor that follows no other.

    Metrics with too few points are absent.
    """
    return {
        metric.name: suite
        for metric in policy.metrics
        if metric.follows is None and not METRICS[metric.name].noise_floor
        if (suite := compare_suite(points, metric.name, policy.confidence)) is not None
    }


def draft_shared(
    suites: Mapping[str, Suite], metrics: Sequence[MetricPolicy], tested: Sequence[Tested]
) -> list[SharedTest]:
    """Return the tests of shared changes, with their shares of the false-alarm rate."""
    drafts = []
    for metric in metrics:
        if (suite := suites.get(metric.name)) is None:
            continue
        weight = sum(each.policy.weight for each in tested if each.policy.name == metric.name)
        small = 1.0 if suite.nights_are_confounded else _MARGIN_OF_ALL
        of_all = {"weight": weight * _OF_ALL, "margin": metric.margin * small}
        of_group = {"weight": weight * _OF_GROUPS / max(len(suite.groups), 1)}
        for shared, terms in ((suite.common, of_all), *((group, of_group) for group in suite.groups)):
            limits, num = (-metric.tolerance, metric.tolerance), len(shared.points)
            own = metric.model_copy(update=terms)
            drafts.append((shared, Tested(own, (shared.comparison,), limits, num, num)))
    return drafts


def settle_shared(
    tests: Sequence[SharedTest], suites: Mapping[str, Suite], policy: GatePolicy, rate: float, today: date
) -> tuple[PointVerdict, ...]:
    """Return the verdicts on shared changes: of all points, and of groups that changed by more."""
    found: dict[tuple[str, ...], list[MetricVerdict]] = {}
    names: dict[tuple[str, ...], str] = {}
    for shared, tested in tests:
        verdict = _settle(shared, tested, suites[tested.policy.name], policy, rate, today)
        if verdict.verdict in _NEWS or (not shared.group and verdict.metric == PRIMARY):
            key = (shared.group, *shared.points)
            found.setdefault(key, []).append(verdict)
            names[key] = _name_of(shared)
    settled = []
    for key, verdicts in found.items():
        deciding = [verdict.verdict for verdict in verdicts if verdict.decides and not verdict.waived]
        worst = next((verdict for verdict in _NEWS if verdict in deciding), GateVerdict.PASS)
        settled.append(PointVerdict(names[key], worst, (), tuple(verdicts)))
    return tuple(settled)


def metrics_that_are_worse(shared: Sequence[PointVerdict]) -> dict[str, bool]:
    """Return the metrics in which all points together regress, and whether the regression is waived."""
    whole = [point for point in shared if point.point.startswith(_ALL)]
    return {m.metric: bool(m.waived) for point in whole for m in point.metrics if m.verdict is GateVerdict.REGRESSION}


def _name_of(shared: SharedChange) -> str:
    """Return the collective name of the points."""
    if shared.group:
        return f"{counted(len(shared.points), 'point')} with {shared.group}"
    return f"{_ALL}{len(shared.points)} points"


def _settle(
    shared: SharedChange, tested: Tested, suite: Suite, policy: GatePolicy, rate: float, today: date
) -> MetricVerdict:
    found, name = shared.comparison, tested.policy.name
    verdict = tested.verdict(1, rate)  # its values are points, not runs
    waived = ""
    if verdict is GateVerdict.REGRESSION:
        waivers = [waiver_for(policy, point, name, today) for point in shared.points]
        if all(w and max(map(abs, (found.lower, found.upper))) <= w.up_to for w in waivers):
            waived = f"waived for all {len(waivers)} of its points"
    return MetricVerdict(
        metric=name,
        verdict=verdict,
        words=_words(shared, tested, verdict, suite, policy.confidence),
        unit=METRICS[name].unit,
        decides=verdict in _NEWS,
        change=found.change,
        interval=(found.lower, found.upper),
        confidence=policy.confidence,
        p_value=tested.p_worse,
        adjusted_p=tested.adjusted_worse,
        waived=waived,
    )


def _words(shared: SharedChange, tested: Tested, verdict: GateVerdict, suite: Suite, confidence: float) -> str:
    found, subject = shared.comparison, _name_of(shared)
    if shared.alike != len(shared.points):
        subject = f"{shared.alike} of {subject.removeprefix(_ALL)}"
    if METRICS[tested.policy.name].unit == "s":
        faster, slower = ("faster", "slower") if 1 in tested.worse else ("higher", "lower")
        text = f"{subject} are {100 * abs(found.change):.2f} % {slower if found.change > 0 else faster}"
    else:
        text = f"{subject} changed by {percent(found.change)}"
    text += f" ({confidence * 100:.4g} % bounds {percent(found.lower)} and {percent(found.upper)})"
    if shared.group:
        text += f"; the others changed by {percent(shared.rest)}"
    if verdict is GateVerdict.REGRESSION:
        return f"{text}; beyond the margin of {percent(tested.policy.margin)}, p = {tested.adjusted_worse:.2g}"
    if shared.group:
        return text
    if suite.night_noise is not None:
        old, new = suite.nights
        return f"{text}; nights differ by {suite.night_noise:.2%} ({old} against {new}), which limits what is seen"
    if suite.nights_are_confounded:
        return f"{text}; how nights differ is not known: take the reference from several nights"
    return f"{text}; what nights differ by is not in these bounds"


def slow_nodes(suites: Mapping[str, Suite]) -> tuple[SlowNode, ...]:
    """Return the nodes whose effect was removed, the slowest first."""
    slow = suites[PRIMARY].nodes.slow if PRIMARY in suites else {}
    found = [SlowNode(name, effect.growth, effect.interval(), effect.runs) for name, effect in slow.items()]
    return tuple(sorted(found, key=lambda node: -node.effect))


def node_notes(nodes: Sequence[SlowNode]) -> list[str]:
    """Return notes on the slow nodes, whose effect is not attributed to the software."""
    notes = []
    for node in nodes:
        names = node.node.split(TOGETHER)
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        several = f"one of the nodes {', '.join(names[:_MOST_NAMES])}{more}, of which no run had one alone, makes their"
        subject = f"node {names[0]} makes its" if len(names) == 1 else several
        notes.append(f"{subject} {counted(node.runs, 'run')} {100 * node.effect:.1f} % slower; that is taken out")
    return notes
