"""What a rehearsal before the run found, in the run's reports."""

import json
from typing import Any

import pytest
from rich.console import Console

from cloudai_mbridge.errors import Damaged
from cloudai_mbridge.rehearsal import Refusal, Rehearsal, RehearsalVerdict, RehearsedPoint
from cloudai_mbridge.rehearsal.record import read_rehearsal, write_rehearsal
from cloudai_mbridge.report import build_report
from cloudai_mbridge.report.read import report_of
from cloudai_mbridge.report.terminal import render_table
from tests.cases import every
from tests.report.conftest import ARun, a_log

pytestmark = pytest.mark.process  # git, which names the commit
BUILT: dict[str, Any] = {"rank": 0, "parameters": {"count": 12345, "bytes": 4}, "new": {"a": [1, None]}}
ASKED: dict[str, Any] = {"python": "/p", "megatron_core": "0.16.1", "transformer_engine": True, "is_job_stack": True}
REHEARSAL = Rehearsal(
    "s",
    "here",
    False,
    (
        RehearsedPoint("t", "mb1", {"mb": 1}, 2, RehearsalVerdict.STARTS, **ASKED, ranks=(0,), built=(BUILT,)),
        RehearsedPoint(
            *("t", "mb2", {"mb": 2}, 2, RehearsalVerdict.REFUSED, "model: ValueError: hf_token=hf_NeverToBeSeen01234"),
            **ASKED,
            ranks=(0,),
            refusals=(Refusal("model", "ValueError", "no", 0, ("a.py:1 f",), ("model.x",)),),
        ),
        RehearsedPoint("t", "mb3", {"mb": 3}, 2, RehearsalVerdict.NOT_EVALUATED, "no GPU"),
    ),
)


def shown(report: Any) -> str:
    console = Console(width=160, record=True)
    with console.capture() as capture:
        console.print(render_table(report))
    return capture.get()


def test_the_file_reads_back_unchanged(embedded: ARun) -> None:
    write_rehearsal(REHEARSAL, embedded.root)
    assert read_rehearsal(embedded.root) == REHEARSAL


def test_report_and_table_have_it(embedded: ARun) -> None:
    embedded.ended("t/mb1/0", a_log(6))
    write_rehearsal(REHEARSAL, embedded.root)
    report = build_report(embedded.root)
    found = [(each.label, str(each.verdict), each.built, each.states.get("parameters")) for each in report.rehearsed]
    assert found == [("mb1", "starts", 1, 12345), ("mb2", "refused", 0, None), ("mb3", "not evaluated", 0, None)]
    data = json.loads(json.dumps(report.to_dict()))
    assert "NeverToBeSeen" not in json.dumps(data)
    assert report_of(data).rehearsed == report.rehearsed
    text = shown(report)
    assert "Rehearsed before the run" in text
    assert "12,345" in text


def test_a_run_without_one_has_no_table(embedded: ARun) -> None:
    report = build_report(embedded.root)
    assert report.rehearsed == ()
    assert "Rehearsed" not in shown(report)


@every("text", ["", "{}", "[1", '{"points": 3}'])
def test_a_damaged_file_is_a_note(embedded: ARun, text: str) -> None:
    (embedded.root / "rehearsal.json").write_text(text)
    with pytest.raises(Damaged):
        read_rehearsal(embedded.root)
    report = build_report(embedded.root)
    assert report.rehearsed == ()
    assert sum("rehearsal.json: is damaged" in note for note in report.notes) == 1
