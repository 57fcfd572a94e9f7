"""What goes into the page, without a browser."""

import hashlib
import json
import math
import re
from importlib import resources
from pathlib import Path
from urllib.parse import unquote

import pytest

from cloudai_mbridge.report.html import (
    MOST_RUNS,
    MOST_VALUES,
    compact,
    differences,
    flatten,
    log_links,
    page_data,
    render_html,
    script_safe_json,
)
from tests.report.html.make_report import make_failed, make_gate, make_point, make_rejected, make_report

PACKAGE = resources.files("cloudai_mbridge.report.html")


@pytest.mark.parametrize("name", ["d3.min.js", "plot.umd.min.js"])
def test_vendored_code_is_what_its_readme_says(name: str) -> None:
    digest = hashlib.sha256(PACKAGE.joinpath("vendor", name).read_bytes()).hexdigest()
    row = re.search(rf"^\| `{re.escape(name)}` .*$", PACKAGE.joinpath("vendor", "README.md").read_text(), re.MULTILINE)
    assert row is not None
    assert f"`{digest}`" in row[0]


def test_no_script_of_the_page_can_be_ended_early() -> None:
    for folder in ("vendor", "assets/js"):
        for file in PACKAGE.joinpath(*folder.split("/")).iterdir():
            if file.name.endswith(".js"):
                text = file.read_text(encoding="utf-8").lower()
                assert "</script" not in text
                assert "<!--" not in text


def test_the_page_never_makes_markup_of_text() -> None:
    for file in PACKAGE.joinpath("assets", "js").iterdir():
        text = file.read_text(encoding="utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert word not in text, f"{file.name}: {word}"


def test_all_modules_are_in_the_page() -> None:
    html = render_html(make_report([]))
    for file in PACKAGE.joinpath("assets", "js").iterdir():
        assert file.read_text(encoding="utf-8") in html
    for file in PACKAGE.joinpath("assets", "css").iterdir():
        assert file.read_text(encoding="utf-8") in html


def test_json_survives_the_script_element() -> None:
    text = "</script><!--<script>&amp;\u2028\u2029🚀\ud800{{data}}"
    escaped = script_safe_json({text: text})
    assert not set(escaped) & set("<>&\u2028\u2029")
    assert escaped.isascii()
    assert json.loads(escaped) == {text: text}


def test_marks_in_the_data_stay_what_they_are() -> None:
    html = render_html(make_report([], scenario="{{data}} {{style}} {{scripts}} {{policy}}"))
    assert html.count("{{data}} {{style}} {{scripts}} {{policy}}") == 1


def test_numbers_that_json_cannot_hold_become_words() -> None:
    gate = make_gate() | {"false_alarm_rate": float("nan")}
    assert page_data(make_report([]), [], gate)["gate"]["false_alarm_rate"] == "nan"
    assert compact([math.inf, -math.inf, 1.23456789, 12, True]) == ["inf", "-inf", 1.234568, 12, True]


def test_what_cannot_be_seen_is_spelt_out() -> None:
    point = make_point("a", {"x\u202ey": "\x1b[31m"}, environment={"n\x00": "\ud800"})
    data = page_data(make_report([point]), [], None)
    assert data["axes"] == ["x\\u202ey"]
    assert data["runs"][0]["coordinates"] == {"x\\u202ey": "\\x1b[31m"}
    assert data["differences"]["environment"]["common"] == {"n\\x00": "\\ud800"}


def test_links_lead_to_logs_that_are_there(tmp_path: Path) -> None:
    """Relative to the page, whatever the directories are called; a link in place of a log is not followed."""
    root = tmp_path / "a #run?%41"
    directory = root / "t" / "x=1 #2" / "0"
    directory.mkdir(parents=True)
    (directory / "stdout.txt").write_text("a step")
    (directory / "stderr.txt").touch()
    point = {"key": "t/x=1 #2/0", "log": {"file": "t/x=1 #2/0/stdout.txt"}}
    report = {"points": [point, {"key": "t/rejected", "log": {}}]}
    for page in (root / "report.html", tmp_path / "elsewhere" / "live.html"):
        page.parent.mkdir(exist_ok=True)
        found = log_links(report, root, page)
        assert found["t/rejected"] == []
        (link,) = found[point["key"]]
        assert link["name"] == "stdout.txt"
        assert re.fullmatch(r"\.[\w%/.]+", link["href"])
        assert (page.parent / unquote(link["href"])).read_text() == "a step"
    (directory / "stderr.txt").unlink()
    (directory / "stderr.txt").symlink_to("/etc/passwd")
    assert [link["name"] for link in log_links(report, root, page)[point["key"]]] == ["stdout.txt"]


def test_steps_become_columns() -> None:
    point = make_failed("a")
    steps = page_data(make_report([point]), [], None)["runs"][0]["steps"]
    assert (steps["first"], steps["numbers"], len(steps["times"])) == (1, [], 20)
    assert steps["losses"][7:9] == ["nan", "nan"]
    del point["steps"][4]
    steps = page_data(make_report([point]), [], None)["runs"][0]["steps"]
    assert (steps["first"], steps["numbers"][3:5]) == (None, [4, 6])


def test_parts_that_earlier_reports_lack_are_no_error() -> None:
    point = make_point("a", comparability=None, environment={})
    del point["predicted"]
    for name in ("peak_memory_gib", "memory_kind", "flops_formula"):
        del point["metrics"][name]
    report = make_report([point])
    del report["environment"]
    run = page_data(report, [], None)["runs"][0]
    assert (run["comparability"], run["peak_memory_gib"], run["nodes"]) == (None, None, ["gb200-1"])


def test_rejected_points_say_nothing_of_the_environment() -> None:
    data = page_data(make_report([make_point("a"), make_rejected("b")]), [], None)
    assert data["differences"]["environment"]["differing"] == {}
    assert data["differences"]["environment"]["common"]["packages.torch"] == "2.13.0"


def test_differences_tell_common_from_differing() -> None:
    runs = [{"a": 1, "b": {"c": "x"}}, {"a": 1, "b": {"c": "y"}}, {"a": 1, "b": {"c": "y"}, "d": None}]
    found = differences(enumerate(runs))
    assert found["common"] == {"a": "1", "d": None}
    assert found["differing"]["b.c"]["values"] == [
        {"text": "y", "count": 2, "runs": [1, 2]},
        {"text": "x", "count": 1, "runs": [0]},
    ]
    missing = differences(enumerate([{"a": 1}, {}]))
    assert [value["text"] for value in missing["differing"]["a"]["values"]] == ["1", None]
    many = differences((i, {"a": i, "b": i % 2}) for i in range(100))["differing"]
    assert (many["a"]["num_values"], len(many["a"]["values"])) == (100, MOST_VALUES)
    assert len(many["b"]["values"][0]["runs"]) == MOST_RUNS


def test_flatten_names_by_path() -> None:
    fields = {"a": {"b": [1, "x"], "c": True}, "r": [{"url": "u"}, {"url": "v"}]}
    assert dict(flatten(fields)) == {"a.b": "1, x", "a.c": "true", "r.1.url": "u", "r.2.url": "v"}
