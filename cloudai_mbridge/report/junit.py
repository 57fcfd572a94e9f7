"""junit.xml: a suite per test, a case per run, as CI servers read them.

A failed run is a failure. Rejected points, points that were not chosen, nodes that failed the pre-test, and points that
a search found to be slow or too large are skipped. A test without any run, or with a part that was not submitted or was
cancelled, has an additional case that is an error: a suite of skipped cases would pass. `time` is the seconds of the
run's job, and is left out if unknown.
"""

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from datetime import datetime

from cloudai_mbridge.files.text import clipped, visible
from cloudai_mbridge.metrics import MEASURES, TABLE_MEASURES, Statistic
from cloudai_mbridge.report.model import PointReport, RunReport
from cloudai_mbridge.report.text import shown_lines
from cloudai_mbridge.verdict import Verdict

_DEFINITIONS = ("memory_kind", "flops_formula", "flops_per_step", "first_loss")
_LAST = (measure for measure in MEASURES if measure not in TABLE_MEASURES)
_NUMBERS = (*(each.name for each in TABLE_MEASURES), *_DEFINITIONS, *(each.name for each in _LAST))
_COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def render_junit(report: RunReport) -> str:
    """Render the report as an XML document."""
    root = ET.Element("testsuites", name=visible(report.scenario))
    tests = (*report.tests, *(point.test_id for point in report.left_out))
    by_test: dict[str, list[PointReport]] = {test_id: [] for test_id in tests}
    for point in report.points:
        by_test.setdefault(point.test_id, []).append(point)
    root.extend(_suite(report, test_id, points) for test_id, points in by_test.items())
    _set_totals(root)
    return xml_text(root)


def _suite(report: RunReport, test_id: str, points: Sequence[PointReport]) -> ET.Element:
    suite = ET.Element("testsuite", name=visible(test_id), timestamp=report.created_at[:19])
    if hostname := report.environment.get("hostname"):
        suite.set("hostname", visible(hostname))
    classname = visible(f"{report.scenario}.{test_id}")
    suite.extend(_case(point, classname, is_skipped=report.tells_search(point)) for point in points)
    left_out = [point for point in report.left_out if point.test_id == test_id]
    for point in left_out:
        case = ET.SubElement(suite, "testcase", name=visible(point.label), classname=classname)
        ET.SubElement(case, "skipped", message=visible(f"left out: {point.reason}"))
    required = [point for point in points if not report.tells_search(point)]
    if (points or not left_out) and (message := _missing(required)) is not None:
        case = ET.SubElement(suite, "testcase", name="(as requested)", classname=classname)
        ET.SubElement(case, "error", message=message, type="not_run")
    _set_totals(suite)
    return suite


def _missing(points: Sequence[PointReport]) -> str | None:
    """Name the requested runs that are missing, None if nothing is missing."""
    if all(point.verdict is Verdict.REJECTED for point in points):
        return "no point of this test ran" + (": all were rejected" if points else "")
    verdicts = [point.verdict for point in points if not point.is_pre_test]
    counts = [(verdicts.count(Verdict.SKIPPED), "not submitted"), (verdicts.count(Verdict.CANCELLED), "cancelled")]
    return "; ".join(f"{n} of {len(points)} runs were {what}" for n, what in counts if n) or None


def _set_totals(element: ET.Element) -> None:
    set_counts(element)
    element.set("time", f"{sum(float(case.get('time', 0)) for case in element.iter('testcase')):.3f}")


def set_counts(element: ET.Element) -> None:
    """Set the numbers of cases, failures, errors and skipped cases below an element."""
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    for attribute, tag in _COUNTED.items():
        element.set(attribute, str(sum(case.find(tag) is not None for case in cases)))


def xml_text(root: ET.Element) -> str:
    """Return an indented XML document."""
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(point: PointReport, classname: str, *, is_skipped: bool) -> ET.Element:
    name = point.label if point.verdict is Verdict.REJECTED else f"{point.label}/{point.iteration}"
    case = ET.Element("testcase", name=visible(name), classname=classname)
    if (seconds := _seconds(point)) is not None:
        case.set("time", f"{seconds:.3f}")
    if properties := list(_properties(point)):
        table = ET.SubElement(case, "properties")
        for key, value in properties:
            ET.SubElement(table, "property", name=key, value=visible(value))
    message = visible(clipped("; ".join(point.reasons)))
    if is_skipped or point.verdict in (Verdict.REJECTED, Verdict.SKIPPED, Verdict.CANCELLED):
        ET.SubElement(case, "skipped", message=message)
    elif point.verdict is Verdict.FAILED and point.is_pre_test:
        ET.SubElement(case, "skipped", message=f"the node failed the pre-test and is excluded: {message}")
    elif point.verdict is Verdict.FAILED:
        kind = point.failure["id"] if point.failure else "failed"
        failure = ET.SubElement(case, "failure", message=message, type=visible(str(kind)))
        failure.text = visible("\n".join([*point.reasons, *map(clipped, shown_lines(point, mark=""))]))
    return case


def _seconds(point: PointReport) -> float | None:
    """Return the duration of the run's job: from its start to its end, else as reported by the scheduler."""
    start, end, known = (point.job.get(name) for name in ("started_at", "ended_at", "run_time_s"))
    try:
        return max(0.0, (datetime.fromisoformat(str(end)) - datetime.fromisoformat(str(start))).total_seconds())
    except (TypeError, ValueError):
        return known if isinstance(known, int | float) else None


def _properties(point: PointReport) -> Iterator[tuple[str, str]]:
    if point.comparability:
        yield "comparability", str(point.comparability["id"])
    m = point.metrics
    if m is None:
        return
    yield "warmup_steps", str(m.warmup_steps)
    if m.window:
        yield "window", f"{m.window[0]}-{m.window[1]}"
    for name in _NUMBERS:
        value = getattr(m, name)
        if isinstance(value, Statistic):
            yield name, str(value.capped_mean)
            yield from ((f"{name}.{key}", str(number)) for key, number in vars(value).items())
        elif value is not None:
            yield name, str(value)
