"""Light, dark, on paper, on small and large screens, and with names that nobody should give."""

import itertools
import math
import re
from importlib import resources
from typing import Any

import pytest

from cloudai_mbridge.files.text import visible
from tests.report.html.conftest import Open, Opened
from tests.report.html.make_report import (
    make_died,
    make_failed,
    make_gate,
    make_history,
    make_nodes,
    make_point,
    make_rejected,
    make_report,
    make_search,
    make_sweep,
)

pytestmark = pytest.mark.process

LEAST_CONTRAST = 4.5
FAR_APART = 18.0
# The smallest contrast of any visible text with the ground behind it, and whose it is
CONTRAST = """() => {
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const f = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
  };
  const ground = e => {
    for (; e; e = e.parentElement) {
      const colour = parts(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  let worst = [99, ''];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || e.closest('script, noscript, .hidden') || !e.checkVisibility()) continue;
    const style = getComputedStyle(e);
    if (e.closest('button:disabled')) continue;
    const colour = e instanceof SVGElement ? style.fill : style.color;
    if (colour === 'none') continue;
    const [a, b] = [light(parts(colour)), light(ground(e))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < worst[0]) worst = [contrast, e.outerHTML.slice(0, 200)];
  }
  return worst;
}"""
NAMES = (
    "<script>alert(1)</script>",
    "\"'>&<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "🚀 👩‍🚀 ünïcode",
    "עברית \u202egnp.exe العربية",
    "/very/" + "long/" * 58 + "path",
    "<!-- <script>",
    "line\u2028line\u2029line {{data}} \x1b[31mred",
    "${x} `${1}` javascript:alert(3)",
)
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return make_report(make_sweep(), notes=["a note"], excluded_nodes={"gb200-9": "its check failed"})


def ground(opened: Opened) -> str:
    return opened.page.evaluate("getComputedStyle(document.body).backgroundColor")


def light_of(colour: str) -> int:
    return sum(int(part) for part in colour[4:-1].split(","))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(show: Open, report: Any, scheme: str) -> None:
    opened = show(report, make_history(), make_gate(), make_nodes(), color_scheme=scheme)
    contrast, where = opened.page.evaluate(CONTRAST)
    assert contrast >= LEAST_CONTRAST, where
    assert (light_of(ground(opened)) < 200) == (scheme == "dark")


def test_the_switch_overrules_the_system(show: Open, report: Any) -> None:
    opened = show(report, color_scheme="light")
    light = ground(opened)
    for expected in ("Theme: light", "Theme: dark"):
        opened.page.click("#theme")
        assert opened.page.inner_text("#theme") == expected
    assert light_of(ground(opened)) < 200
    opened.page.focus("#theme")
    opened.page.keyboard.press("Enter")
    assert opened.page.inner_text("#theme") == "Theme: auto"
    assert ground(opened) == light


def test_on_paper_everything_is_shown(show: Open, report: Any) -> None:
    opened = show(make_report(make_sweep(repeats=4)), color_scheme="dark")
    opened.page.emulate_media(media="print")
    opened.page.wait_for_function("() => document.querySelectorAll('#rows tr[data-run]').length > 200")
    opened.settle()
    assert light_of(ground(opened)) == 3 * 255
    assert opened.page.evaluate(CONTRAST)[0] >= LEAST_CONTRAST
    for hidden in ("#filters", "#theme", "nav", ".pages", "figure details"):
        assert not opened.page.locator(hidden).first.is_visible(), hidden
    region = opened.page.locator("#table .region")
    assert region.evaluate("r => r.scrollHeight <= r.clientHeight + 1")
    assert opened.page.locator("#rows tr[data-run]").first.evaluate("r => getComputedStyle(r).breakInside") == "avoid"
    assert opened.page.locator("details[data-print]:not([open])").count() == 0
    opened.page.emulate_media(media="screen")
    opened.page.wait_for_function("() => document.querySelectorAll('#rows tr[data-run]').length === 200")
    assert opened.page.locator("details[data-print]:not([open])").count() > 0
    opened.assert_quiet()


def test_the_table_fits_on_the_paper(show: Open, report: Any) -> None:
    opened = show(report, width=720)
    opened.page.emulate_media(media="print")
    opened.settle()
    assert opened.page.evaluate(WIDER) <= 0
    assert opened.page.locator("#rows").evaluate("t => t.getBoundingClientRect().right <= innerWidth")
    assert opened.page.pdf(format="A4", prefer_css_page_size=True).startswith(b"%PDF")


@pytest.mark.parametrize("width", [320, 3840])
def test_no_width_makes_the_page_scroll_sideways(show: Open, report: Any, width: int) -> None:
    opened = show(report, make_history(), make_gate(), make_nodes(), width=width)
    assert opened.page.evaluate(WIDER) <= 0
    for svg in opened.page.query_selector_all("main figure .plot svg"):
        assert svg.bounding_box()["width"] <= width
    opened.assert_quiet()


@pytest.mark.parametrize("width", [420, 1400])
def test_no_table_hides_a_column(show: Open, report: Any, width: int) -> None:
    opened = show(report, make_history(), make_gate(), make_nodes(), width=width)
    cut = """() => [...document.querySelectorAll('main .region, main .plot')]
      .filter(e => e.scrollWidth > e.clientWidth + 1)
      .map(e => e.getAttribute('aria-label') ?? e.outerHTML.slice(0, 80))"""
    assert opened.page.evaluate(cut) == []
    why = opened.page.locator("#rows div.why").first
    assert why.evaluate("e => e.scrollWidth <= e.clientWidth && e.getBoundingClientRect().right <= innerWidth")


@pytest.mark.parametrize("width", [420, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(show: Open, scheme: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    # Its time grows with the table: all rows once, else some of every kind
    points = make_sweep(repeats=2, most=None if (scheme, width) == ("light", 1400) else 40)
    report = make_report(points, notes=["a note"], searches=[make_search()])
    opened = show(report, make_history(), make_gate(), make_nodes(), width=width, color_scheme=scheme)
    opened.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    opened.settle()
    found = Axe().run(opened.page, options={"resultTypes": ["violations"]}).response["violations"]
    serious = [violation for violation in found if violation["impact"] in ("serious", "critical")]
    assert [(v["id"], [node["html"] for node in v["nodes"][:3]]) for v in serious] == []


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_that_mean_different_things_are_apart(scheme: int) -> None:
    """Selected runs, fifths of step time, verdicts and data; in CIELAB, where 2 is just noticeable."""
    css = resources.files("cloudai_mbridge.report.html").joinpath("assets/css/theme.css").read_text()
    roles: dict[str, list[Any]] = {}
    for role, *pair in re.findall(
        r"--(series|class|failed|skipped|rejected|data)[-\d]*: light-dark\((#\w+), (#\w+)\)", css
    ):
        roles.setdefault(role, []).append(lab(pair[scheme]))
    assert {role: len(colours) for role, colours in roles.items() if len(colours) > 1} == {"series": 5, "class": 5}
    for one, other in itertools.combinations(roles, 2):
        if {one, other} != {"rejected", "data"}:  # they are never in one chart
            distance = min(math.dist(a, b) for a in roles[one] for b in roles[other])
            assert distance > FAR_APART, (one, other)
    assert min(math.dist(a, b) for a, b in itertools.combinations(roles["series"], 2)) > FAR_APART


def lab(colour: str) -> tuple[float, float, float]:
    """Return L*, a*, b* of an sRGB colour such as #0072b2."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
    )
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_charts_follow_the_width(show: Open, report: Any) -> None:
    opened = show(report)
    opened.page.set_viewport_size({"width": 500, "height": 800})
    opened.page.wait_for_function(
        "() => document.querySelector('#distribution figure svg').getAttribute('width') < 500"
    )
    opened.settle()
    assert opened.page.evaluate(WIDER) <= 0


def hostile_report() -> dict[str, Any]:
    makers = (make_point, make_failed, make_died, make_rejected)
    points = []
    for number, name in enumerate(NAMES):
        point = makers[number % 4](name, {name: name, "path": name, "n": number})
        point.update(test_id=name, reasons=[name, *point["reasons"]], evidence=[name, *point["evidence"]])
        if point["failure"]:
            point["failure"] = {**point["failure"], "title": name, "id": name, "remedy": name, "nodes": [name]}
        if point["environment"]:
            point["environment"] = {**point["environment"], "nodes": [name], name: name, "driver": name}
            point["job"] = {**point["job"], "reason": name, "job_id": name}
            point["log"] = {"file": name, "source": "records", "notes": [name]}
        for violation in point["violations"]:
            violation.update(dict.fromkeys(("rule_id", "where", "fact", "remedy", "message"), name))
        points.append(point)
    return make_report(
        points,
        scenario=NAMES[0],
        system=NAMES[2],
        notes=list(NAMES),
        excluded_nodes={name: name for name in NAMES},
        rule_counts=dict.fromkeys(NAMES, 1),
        environment={name: name for name in NAMES},
    )


def hostile_gate() -> dict[str, Any]:
    gate = make_gate()
    point = {**gate["points"][1], "point": NAMES[0], "words": list(NAMES)}
    point["metrics"] = [{**metric, "words": NAMES[1], "waived": NAMES[2]} for metric in point["metrics"]]
    changes = {NAMES[0]: NAMES[5]}
    return gate | {"policy": NAMES[1], "notes": list(NAMES), "points": [point], "environment_changes": changes}


def hostile_nodes() -> dict[str, Any]:
    nodes = make_nodes()
    odd = [{**nodes["odd"][0], "node": NAMES[0], "fact": NAMES[1], "value": NAMES[2], "usual": NAMES[5]}]
    named = [{**node, "node": name} for node, name in zip(nodes["nodes"], NAMES, strict=False)]
    return nodes | {"nodes": named, "notes": list(NAMES), "odd": odd}


def test_hostile_names_come_out_as_text(show: Open) -> None:
    history = [
        {**row, "words": NAMES[1], "commit": NAMES[0], "run_id": NAMES[2], "is_change": True}
        for name in NAMES
        for row in make_history(name, num_runs=4)
    ]
    opened = show(hostile_report(), history, hostile_gate(), hostile_nodes())
    page = opened.page
    shown = [visible(name) for name in NAMES]
    for details in page.query_selector_all("details"):
        details.evaluate("d => d.open = true")
    page.select_option("#history select >> nth=0", index=3)
    page.hover("#curves figure svg >> nth=0")
    page.hover("#pareto figure svg >> nth=0")
    assert page.inner_text("h1") == f"{NAMES[0]} on {NAMES[2]}"
    assert sorted(opened.names()) == sorted(f"{name}/{name}" for name in shown)
    for section in ("node-map", "failures", "rejected", "excluded", "environment"):
        text = page.text_content(f"section#{section}")
        assert any(name in text for name in shown), section
    excluded = page.text_content("#excluded")
    assert all(name in excluded for name in shown)
    evidence = "\n".join(page.locator("#failures pre").all_text_contents())
    assert all(name in evidence for number, name in enumerate(shown) if number % 4 in (1, 2))
    assert page.locator("script").count() == 5
    assert page.locator("main img, main script, main iframe, main a[href^='javascript']").count() == 0
    assert page.evaluate(WIDER) <= 0
    opened.assert_quiet()


def test_hostile_names_on_a_small_screen_and_on_paper(show: Open) -> None:
    opened = show(hostile_report(), make_history(NAMES[5]), hostile_gate(), hostile_nodes(), width=320)
    assert opened.page.evaluate(WIDER) <= 0
    opened.page.emulate_media(media="print")
    opened.settle()
    opened.assert_quiet()


def test_hostile_names_can_be_filtered_and_sorted(show: Open) -> None:
    opened = show(hostile_report())
    opened.filter("<script>alert(1)")
    assert opened.page.inner_text("#count") == "1 of 9 rows"
    opened.filter("")
    opened.page.click("th[data-column='axis:path'] button")
    assert len(opened.names()) == len(NAMES)
    opened.page.click("#axis-filters summary")
    opened.page.locator("#filters input[data-kind='axis:path']").first.check()
    opened.settle()
    assert opened.page.inner_text("#count") == "1 of 9 rows"
    opened.assert_quiet()
