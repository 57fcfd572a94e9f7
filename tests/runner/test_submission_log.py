"""The log of submissions may be damaged, as every file that lies about."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.files.regular import NotRegular
from cloudai_mbridge.runner.journal import SubmissionLog

TOKEN = "0123456789abcdef"


@pytest.fixture
def log(tmp_path: Path) -> SubmissionLog:
    log = SubmissionLog(tmp_path)
    log.submitting(TOKEN, [("a/0/0", 1), ("a/1/0", 2)])
    log.withdrawn(TOKEN, ["a/1/0"], is_doubtful=True)
    return log


def known(log: SubmissionLog) -> list[tuple[Any, ...]]:
    return [(each.key, each.number, each.token, each.is_withdrawn, each.is_doubtful) for each in log.read()]


def test_what_was_submitted_and_given_up(log: SubmissionLog) -> None:
    assert known(log) == [("a/0/0", 1, TOKEN, False, False), ("a/1/0", 2, TOKEN, True, True)]
    assert {each.host for each in log.read()} == {os.uname().nodename}


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b"null",
        b"\xff\xfe",
        b'{"token": "0123456789abcdef", "attempts": [["a/0/0", 1',
        *(
            json.dumps({"token": token, "attempts": [["a/0/0", number]]}).encode()
            for token, number in [
                *((bad, 2) for bad in ("a\0b", "\ud800", "../../../x", "0123")),
                *((TOKEN, bad) for bad in (10**30, 0, -1, True, 1.5)),
            ]
        ),
        json.dumps({"token": TOKEN, "host": 3, "attempts": [["a/0/0", 2]]}).encode(),
        json.dumps({"token": TOKEN, "attempts": [[1, 1]]}).encode(),
        json.dumps({"token": TOKEN, "attempts": 1}).encode(),
    ],
    ids=lambda line: line[:60].decode(errors="replace"),
)
def test_a_damaged_line_is_passed_over(log: SubmissionLog, tmp_path: Path, line: bytes) -> None:
    before = known(log)
    with (tmp_path / "submissions.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert known(log) == before
    log.submitting("f" * 16, [("b/0/0", 1)])
    assert known(log) == [*before, ("b/0/0", 1, "f" * 16, False, False)]


def test_a_cut_line_is_taken_away(log: SubmissionLog, tmp_path: Path) -> None:
    """It was cut before anything was submitted, and must not look like damage later."""
    before = known(log)
    with (tmp_path / "submissions.jsonl").open("ab") as file:
        file.write(b'{"token": "0123')
    again = SubmissionLog(tmp_path)
    assert known(again) == before
    again.submitting("f" * 16, [("b/0/0", 1)])
    again.submitting("e" * 16, [("b/0/0", 2)])
    assert len(known(again)) == len(before) + 2
    assert again.damaged_line() is None


def test_a_last_line_without_an_end_counts(log: SubmissionLog, tmp_path: Path) -> None:
    """Some editors take the end of the last line away."""
    path = tmp_path / "submissions.jsonl"
    before = known(log)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    again = SubmissionLog(tmp_path)
    assert known(again) == before
    again.submitting("f" * 16, [("b/0/0", 1)])
    assert len(known(again)) == len(before) + 1
    assert again.damaged_line() is None


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "submissions.jsonl")
    with pytest.raises(NotRegular):
        SubmissionLog(tmp_path).read()


def test_without_a_log_nothing_was_submitted(tmp_path: Path) -> None:
    assert SubmissionLog(tmp_path).read() == []
