"""What a gate says, as JUnit XML: a suite per point, a case per metric. Whatever is not green is a failure."""

import xml.etree.ElementTree as ET

from cloudai_mbridge.gate.compare.verdict import GREEN, GateResult, MetricVerdict, PointVerdict
from cloudai_mbridge.report.formats.visible import visible

_WHOLE = "(the point)"


def render_gate_junit(result: GateResult) -> str:
    """Render the gate as an XML document. Metrics that do not decide are skipped, and so are waived ones."""
    root = ET.Element("testsuites", name=visible(f"gate {result.policy}"))
    root.extend(_suite(point) for point in result.points)
    if not result.points:
        suite = ET.SubElement(root, "testsuite", name="gate", tests="1", failures="0", errors="1", skipped="0")
        case = ET.SubElement(suite, "testcase", name="(any point)", classname="gate")
        ET.SubElement(case, "error", message="there is no point to judge", type=str(result.verdict))
    for attribute in ("tests", "failures", "errors", "skipped"):
        root.set(attribute, str(sum(int(suite.get(attribute, "0")) for suite in root)))
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(point: PointVerdict) -> ET.Element:
    suite = ET.Element("testsuite", name=visible(point.point))
    suite.append(_whole(point))
    suite.extend(_case(point, metric) for metric in point.metrics)
    cases = list(suite)
    for attribute, tag in (("tests", None), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(tag is None or case.find(tag) is not None for case in cases)))
    return suite


def _whole(point: PointVerdict) -> ET.Element:
    """Return the case of the point itself, which fails whenever the point is not green."""
    case = ET.Element("testcase", name=_WHOLE, classname=visible(point.point))
    if point.verdict not in GREEN:
        text = "; ".join(point.words) or f"see its metrics: {point.verdict}"
        ET.SubElement(case, "failure", message=visible(text), type=str(point.verdict))
    return case


def _case(point: PointVerdict, metric: MetricVerdict) -> ET.Element:
    case = ET.Element("testcase", name=metric.metric, classname=visible(point.point))
    if metric.waived:
        ET.SubElement(case, "skipped", message=visible(metric.waived))
    elif metric.verdict in GREEN:
        ET.SubElement(case, "system-out").text = visible(metric.words)
    elif metric.decides:
        ET.SubElement(case, "failure", message=visible(metric.words), type=str(metric.verdict))
    else:
        ET.SubElement(case, "skipped", message=visible(f"{metric.verdict}: {metric.words}"))
    return case
