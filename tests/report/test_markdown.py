"""report.md: rendered by a Markdown parser and read back, it says what the report says, whatever the names."""

import html.parser
import re
from typing import Any

import pytest
from markdown_it import MarkdownIt

from cloudai_mbridge.files.text import visible
from cloudai_mbridge.metrics import measure
from cloudai_mbridge.report.markdown import folded, inline, preformatted, render_markdown
from cloudai_mbridge.verdict import Verdict
from tests.report.conftest import NASTY, VIOLATION, some_point, some_rejected, some_report

MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])

_BLOCKS = ("td", "th", "h1", "h2", "code", "pre", "p", "li")


class _Page(html.parser.HTMLParser):
    """The tags of a page, the text of its cells, headings, code and blocks, and its runs of text between tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.blocks: list[str] = []
        self.pieces: list[str] = []
        self._open = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag in _BLOCKS:
            self.blocks.append("")
            self._open += 1
        if tag == "br":
            self.blocks[-1] += "\n"

    def handle_endtag(self, tag: str) -> None:
        self._open -= tag in _BLOCKS

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)
        if self._open:
            self.blocks[-1] += data


def _page(text: str) -> _Page:
    return _Page(MARKDOWN.render(text))


@pytest.mark.parametrize("text", NASTY)
def test_a_cell_shows_its_text(text: str) -> None:
    page = _page(f"| a | b |\n| --- | --- |\n| {inline(text)} | x |\n")
    assert page.blocks[2:] == [text, "x"]
    assert set(page.tags) <= {"table", "thead", "tbody", "tr", "th", "td", "br"}
    assert page.tags.count("td") == 2


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("form", ["# {}\n", "- {}\n", "{}\n"])
def test_a_heading_and_a_list_show_their_text(text: str, form: str) -> None:
    page = _page(form.format(inline(text)))
    assert set(page.tags) <= {"h1", "ul", "li", "p", "br"}
    assert page.blocks == [text]


@pytest.mark.parametrize("text", ["@everyone", "#1", "a@b.example", "https://c.example", "www.d.example", ":smile:"])
def test_nothing_is_left_for_github_to_turn_into_links_mentions_and_pictures(text: str) -> None:
    """It looks for them in runs of text, and a comment ends a run."""
    pieces = _page(f"x {inline(text)} y").pieces
    assert "".join(pieces).strip() == f"x {text} y"
    assert not any(re.search(r"@\w|#\d|://|www\.|:\w+:", piece) for piece in pieces)


@pytest.mark.parametrize("text", NASTY)
def test_evidence_stays_in_its_block(text: str) -> None:
    page = _page(f"{folded(text, preformatted([text, '', text]))}\n# next\n")
    assert page.tags == ["details", "summary", "code", "pre", "h1"]
    code, pre, heading = page.blocks
    assert code.strip() == " ".join(text.split())
    assert pre.strip("\n") == f"{text}\n\n{text}"
    assert heading.strip() == "next"


def test_what_cannot_be_seen_is_spelt_out() -> None:
    assert visible("a\x1b[31m\x00\r\u202eb\ud800\ufffe\tc\nd") == "a\\x1b[31m\\x00\\x0d\\u202eb\\ud800\\ufffe\tc\nd"


def test_a_long_text_is_cut_and_says_so() -> None:
    assert inline("x" * 2500) == "x" * 2000 + "… &#40;500 more characters&#41;"


def test_the_whole() -> None:
    failed = some_point(
        Verdict.FAILED,
        "tp2",
        steps=(),
        metrics=measure((), 2, None),
        reasons=("0 of 4 steps are in the log",),
        evidence=("stderr.txt:1: killed",),
        failure={"id": "oom", "kind": "application", "title": "Out of memory", "remedy": "smaller mb"},
    )
    report = some_report(
        *(some_point(), failed, some_rejected()),
        num_rejected=1001,
        rule_counts={"C04": 1001},
        excluded_nodes={"n7": "gpu_lost in a/b/0"},
        notes=("1000 more",),
        environment={"python": "3.11.7", "git": {"commit": "c0ffee", "dirty": True}, "packages": {"numpy": "2.4.6"}},
    )
    page = _page(render_markdown(report))
    assert page.blocks[0] == "s on here: did not succeed"
    assert "1 success, 1 failed, 0 skipped, 1 rejected" in page.blocks
    text = " ".join(page.blocks)
    rows = [page.blocks[i : i + 8] for i, block in enumerate(page.blocks) if re.fullmatch(r"sweep/tp[12]/0", block)]
    assert [row[0] for row in rows] == ["sweep/tp2/0", "sweep/tp1/0"]  # the worst comes first
    assert rows[0][2:] == ["0/4", "not measured", "not measured", "not measured", "not measured", failed.reasons[0]]
    assert rows[1][1:] == ["success", "4/4", "3.43 ±0.43 (mean 3.5)", "35.0 ±4.4", "29.2 ±3.7", "1.5", ""]
    for said in (
        "mean ±std over steps 3-4 (n=2), warm-up 1-2 left out; FLOPs by megatron-bridge/new; memory: resident set",
        "sweep/tp2/0: Out of memory",
        "stderr.txt:1: killed",
        "remedy: smaller mb",
        "1001 points broke a rule and did not run.",
        f"C04 1001 sweep/tp9/0 {VIOLATION['message']}",
        "n7 gpu_lost in a/b/0",
        "written with git c0ffee with changes",
        "written with numpy 2.4.6",
        "1000 more",
    ):
        assert said in text


@pytest.mark.parametrize("name", NASTY)
def test_names_anywhere(name: str) -> None:
    points = (
        some_point(label=name, environment={"device": name, "nodes": [name], "packages": {name: name}}),
        some_point(Verdict.FAILED, key=name, reasons=(name,), evidence=(name,)),
        some_rejected(violations=({**VIOLATION, "rule_id": name, "message": name},)),
    )
    report = some_report(*points, scenario=name, system=name, excluded_nodes={name: name}, notes=(name,))
    page = _page(render_markdown(report))
    known = {"h1", "h2", "p", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "strong", "br"}
    assert set(page.tags) <= known | {"details", "summary", "pre", "code"}
    assert page.blocks[0] == f"{name} on {name}: did not succeed"
    assert page.blocks.count(name) >= 7


def test_ten_thousand_points_fit_into_a_summary() -> None:
    why = {"reasons": ("x" * 3000,), "evidence": ("<" * 3000,) * 15}
    points = [some_point(Verdict.FAILED, f"tp{i}", num_steps=3, **why) for i in range(5000)]
    points += [some_point(label=f"{'long' * 40}{i}", num_steps=3) for i in range(5000)]
    text = render_markdown(some_report(*points, notes=("n" * 2000,) * 100))
    assert len(text.encode()) < 900 * 1024
    table, failures, notes = (
        int(found[1])
        for what in ("runs", "failures", "notes")
        if (found := re.search(rf"^(\d+) more {what} are", text, re.M))
    )
    shown = text.count("\n| sweep/tp")
    assert shown + table == 10_000
    assert text.count("<details>") + failures == 5000
    assert notes > 0
    assert text.count("<details>") == text.count("</details>")


def test_nothing_ran() -> None:
    page = _page(render_markdown(some_report()))
    assert page.blocks[0] == "s on here: did not succeed"
