"""Cases that run in one test: all of them run, those that fail are named, and none sees what another left."""

import os
from pathlib import Path

import pytest

from tests.cases import every


def test_every_case_runs_and_those_that_fail_are_named() -> None:
    ran: list[int] = []

    @every("number, limit", [(1, 3), (5, 3), pytest.param(7, 3, id="seven"), (2, 3)])
    def check(number: int, limit: int) -> None:
        ran.append(number)
        assert number < limit

    with pytest.raises(AssertionError, match=r"(?s)2 of 4 cases failed:\n\(5, 3\): Assert.*\nseven: AssertionError"):
        check()
    assert ran == [1, 5, 7, 2]


def test_a_case_that_is_skipped_has_failed() -> None:
    @every("reason", ["not here"])
    def check(reason: str) -> None:
        pytest.skip(reason)

    with pytest.raises(AssertionError, match="'not here': Skipped"):
        check()


def test_a_table_without_cases_is_refused() -> None:
    with pytest.raises(AssertionError, match="no case"):
        every("name", [])


@every("text", ["a", "b"])
@every("number", [1, 2])
def test_each_case_has_its_own_fixtures(
    text: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch(exist_ok=False)
    assert "MB_CASE" not in os.environ
    monkeypatch.setenv("MB_CASE", text)
    print(text, number)
    assert capsys.readouterr().out == f"{text} {number}\n"
    print("left behind")
