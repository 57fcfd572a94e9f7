"""The journal survives the process that wrote it."""

import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import Damaged, OtherVersion, ToolFailure
from cloudai_mbridge.runner import Journal
from cloudai_mbridge.runner.journal import Attempt, JournalEntry
from cloudai_mbridge.runner.journal_file import JOURNAL_VERSION, UNTRIED, VERDICTS
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from cloudai_mbridge.verdict import Verdict
from tests.golden import Sentence

RUNNING = JobStatus("RUNNING", JobClass.ACTIVE, nodes="n[1-2]", run_time_s=3.5, restarts=1)
FAILED = JobStatus("FAILED", JobClass.FAILED, exit_code=0, signal=9, reason='it\'s "over"; --', nodes="n1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    journal = Journal(path)
    yield journal
    journal.close()


@pytest.fixture
def begun(journal: Journal) -> Journal:
    """A journal of one run with an attempt that is being submitted."""
    journal.plan(["k"])
    journal.intend([("k", 1)], "cafe")
    return journal


def _reopened(path: Path) -> dict[str, JournalEntry]:
    journal = Journal(path)
    try:
        return journal.entries()
    finally:
        journal.close()


def _last(path: Path, key: str) -> Attempt:
    last = _reopened(path)[key].last
    assert last is not None
    return last


def test_every_change_is_on_disk_at_once(journal: Journal, path: Path) -> None:
    journal.plan(["a/x/0", "b/y/0"])
    assert _reopened(path) == {key: JournalEntry(key, None, (), ()) for key in ("a/x/0", "b/y/0")}
    journal.intend([("a/x/0", 1)], "cafe")
    last = _last(path, "a/x/0")
    assert (last.number, last.token, last.job_id, last.status, last.submitted_at) == (1, "cafe", None, None, None)
    journal.submitted("a/x/0", 1, "17")
    assert _last(path, "a/x/0").job_id == "17"
    journal.saw("a/x/0", 1, RUNNING)
    assert _last(path, "a/x/0").status == RUNNING
    journal.saw("a/x/0", 1, FAILED)
    assert _last(path, "a/x/0").status == FAILED
    journal.decided("a/x/0", "failed", ["one", "two"])
    entry = _reopened(path)["a/x/0"]
    assert (entry.verdict, entry.reasons) == ("failed", ("one", "two"))
    assert _reopened(path)["b/y/0"] == JournalEntry("b/y/0", None, (), ())


@pytest.mark.parametrize("job_class", JobClass)
def test_every_class_comes_back(begun: Journal, path: Path, job_class: JobClass) -> None:
    status = JobStatus("PENDING", job_class, reason="BadConstraints", hopeless=job_class)
    begun.saw("k", 1, status)
    assert _last(path, "k").status == status


def test_the_times_of_an_attempt(begun: Journal, path: Path) -> None:
    last = _last(path, "k")
    assert (last.submitted_at, last.started_at, last.ended_at) == (None, None, None)
    begun.submitted("k", 1, "1")
    begun.saw("k", 1, JobStatus("PENDING", JobClass.ACTIVE))
    last = _last(path, "k")
    assert last.submitted_at is not None
    assert (last.started_at, last.ended_at) == (None, None)
    begun.saw("k", 1, RUNNING)
    started_at = _last(path, "k").started_at
    assert started_at is not None
    begun.saw("k", 1, JobStatus("COMPLETING", JobClass.ACTIVE))
    assert _last(path, "k").ended_at is None
    begun.saw("k", 1, JobStatus("COMPLETED", JobClass.SUCCEEDED))
    last = _last(path, "k")
    assert last.ended_at is not None
    assert last.started_at == started_at
    times = [datetime.fromisoformat(text) for text in (last.submitted_at or "", started_at, last.ended_at)]
    assert times == sorted(times)
    assert all(time.tzinfo is not None for time in times)


@pytest.mark.parametrize("state", ["REFUSED", "LOST", "CANCELLED"])
def test_what_never_ran_has_no_start(begun: Journal, path: Path, state: str) -> None:
    begun.saw("k", 1, JobStatus(state, JobClass.FAILED, run_time_s=0.0))
    assert _last(path, "k").started_at is None


def test_a_key_is_planned_once(journal: Journal, path: Path) -> None:
    """Whoever resumes plans again; what is there stays as it is."""
    journal.plan(["k"])
    journal.decided("k", "success", [])
    journal.plan(["k", "l"])
    assert {key: entry.verdict for key, entry in _reopened(path).items()} == {"k": "success", "l": None}


def test_keys_are_data(journal: Journal, path: Path) -> None:
    keys = ["'; DROP TABLE runs; --", "é😀", ""]
    journal.plan(keys)
    journal.intend([(keys[0], 1)], "'")
    journal.submitted(keys[0], 1, "'")
    journal.exclude("'n", "'why")
    assert list(_reopened(path)) == keys
    assert _last(path, keys[0]).job_id == "'"
    assert journal.excluded() == {"'n": "'why"}


# Attempts


def test_attempts_stand_side_by_side(journal: Journal, path: Path) -> None:
    journal.plan(["k", "l"])
    journal.intend([("k", 1), ("l", 1)], "cafe")
    journal.submitted("k", 1, "17_0")
    journal.saw("k", 1, FAILED)
    journal.failed("k", 1, "node_failure")
    journal.intend([("k", 2)], "beef")
    entries = _reopened(path)
    first, second = entries["k"].attempts
    assert (first.number, first.token, first.job_id, first.status, first.failure) == (
        *(1, "cafe", "17_0", FAILED, "node_failure"),
    )
    assert (second.number, second.token, second.job_id, second.status, second.failure) == (2, "beef", None, None, "")
    assert entries["k"].last == second
    assert [attempt.token for attempt in entries["l"].attempts] == ["cafe"]


def test_an_attempt_is_intended_once(journal: Journal, path: Path) -> None:
    journal.plan(["k", "l"])
    journal.intend([("k", 1)], "cafe")
    with pytest.raises((sqlite3.IntegrityError, ToolFailure)):
        journal.intend([("l", 1), ("k", 1)], "beef")
    assert _reopened(path)["l"].attempts == ()  # all of a submission, or nothing
    assert _last(path, "k").token == "cafe"


def test_forgotten_is_as_never_intended(journal: Journal, path: Path) -> None:
    journal.plan(["k"])
    before = _reopened(path)
    journal.intend([("k", 1)], "cafe")
    journal.forget("k", 1, "the scheduler is busy")
    assert _reopened(path) == before
    assert any("the scheduler is busy" in event.text for event in journal.events())
    journal.intend([("k", 1)], "beef")
    assert _last(path, "k").token == "beef"


def test_what_a_cancelled_attempt_will_count_as(journal: Journal, path: Path) -> None:
    hung = JobStatus("HUNG", JobClass.FAILED, reason="no step for 1801 s")
    journal.plan(["k"])
    journal.intend([("k", 1)], "cafe")
    journal.saw("k", 1, RUNNING)
    journal.ending("k", 1, hung)
    last = _last(path, "k")
    assert (last.ending, last.status, last.ended_at) == (hung, RUNNING, None)


def test_a_run_that_is_taken_up_again_has_no_verdict(begun: Journal, path: Path) -> None:
    begun.saw("k", 1, FAILED)
    begun.decided("k", "failed", ["why"])
    begun.reopen("k")
    entry = _reopened(path)["k"]
    assert (entry.verdict, entry.reasons) == (None, ())
    assert entry.last is not None
    assert entry.last.status == FAILED


# What is told


def test_every_change_is_an_event(begun: Journal) -> None:
    begun.submitted("k", 1, "17")
    begun.saw("k", 1, JobStatus("RUNNING", JobClass.ACTIVE, reason="why"))
    begun.ending("k", 1, JobStatus("HUNG", JobClass.FAILED, reason="no step"))
    begun.saw("k", 1, JobStatus("HUNG", JobClass.FAILED))
    begun.decided("k", "failed", [])
    begun.reopen("k")
    begun.exclude("n1", "broken")
    begun.note("squeue is silent")
    events = begun.events()
    expected = ["cafe", "17", "RUNNING (why)", "HUNG", "HUNG", "failed", "again", "n1", "squeue is silent"]
    assert len(events) == len(expected)
    assert all(word in event.text for word, event in zip(expected, events, strict=True))
    assert [event.key for event in events] == ["k"] * 7 + [None] * 2
    assert [event.at for event in events] == sorted(event.at for event in events)


def test_a_node_is_excluded_for_its_first_reason(journal: Journal) -> None:
    journal.exclude("n2", "gpu_lost in a")
    journal.exclude("n2", "down")
    journal.exclude("n1", "drained")
    assert journal.excluded() == {"n2": "gpu_lost in a", "n1": "drained"}


# Transactions and processes


def test_a_transaction_is_all_or_nothing(journal: Journal, path: Path) -> None:
    journal.plan(["k"])

    def fail() -> None:
        with journal.transaction():
            journal.intend([("k", 1)], "cafe")
            journal.submitted("k", 1, "17")
            assert _reopened(path)["k"].attempts == ()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert _reopened(path)["k"].attempts == ()
    with journal.transaction():
        journal.intend([("k", 1)], "cafe")
        journal.submitted("k", 1, "17")
    assert _last(path, "k").job_id == "17"


def test_a_journal_that_cannot_be_written_is_the_tools_failure(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    journal.plan(["k"])
    monkeypatch.setattr("cloudai_mbridge.runner.journal._BUSY_TIMEOUT_S", 0.05)
    late = Journal(path)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(ToolFailure) as caught:
        late.intend([("k", 1)], "cafe")
    sentence(caught)
    blocker.execute("ROLLBACK")
    blocker.close()
    late.intend([("k", 1)], "cafe")
    late.close()
    assert _last(path, "k").token == "cafe"


def _write_many(path: Path, prefix: str, count: int) -> None:
    journal = Journal(path)
    journal.plan(f"{prefix}{i}" for i in range(count))
    for i in range(count):
        journal.intend([(f"{prefix}{i}", 1)], f"{prefix}-{i}")
        journal.submitted(f"{prefix}{i}", 1, str(i))
    journal.close()


@pytest.mark.process
def test_two_processes_write_at_the_same_time(path: Path) -> None:
    Journal(path).close()
    context: Any = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, prefix, 8)) for prefix in "ab"]
    for writer in writers:
        writer.start()
    for _ in range(8):
        _reopened(path)  # `mbridge status` in between
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    entries = _reopened(path)
    assert len(entries) == 16
    assert all(entry.last is not None and entry.last.job_id is not None for entry in entries.values())


def _write_and_die(path: Path) -> None:
    journal = Journal(path)
    journal.plan(["k"])
    journal.intend([("k", 1)], "cafe")
    with journal.transaction():
        journal.submitted("k", 1, "17")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
def test_what_was_written_outlives_the_writer(path: Path) -> None:
    context: Any = multiprocessing.get_context("fork")
    writer = context.Process(target=_write_and_die, args=(path,))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    last = _last(path, "k")
    assert (last.token, last.job_id) == ("cafe", None)


# Versions, and looking without writing


def test_verdicts_are_those_of_reports() -> None:
    """A run that a search did not need is not in the report; a rejected or unfinished point not in the journal."""
    assert {str(verdict) for verdict in Verdict} - {"rejected", "unfinished"} == VERDICTS - {UNTRIED}


def test_another_version_is_refused_and_left_alone(path: Path, sentence: Sentence) -> None:
    Journal(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 2")
    db.close()
    before = path.read_bytes()
    with pytest.raises(OtherVersion) as caught:
        Journal(path)
    sentence(caught)
    with pytest.raises(OtherVersion) as caught, Journal.read_only(path):
        pass
    sentence(caught)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_journal_without_a_version_is_of_the_first(path: Path) -> None:
    journal = Journal(path)
    journal.plan(["k"])
    journal.close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 0")
    db.close()
    assert list(_reopened(path)) == ["k"]
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (JOURNAL_VERSION,)
    db.close()


def test_a_reader_sees_what_a_living_writer_has_written(journal: Journal, path: Path) -> None:
    journal.plan(["k"])
    with Journal.read_only(path) as reader:
        assert list(reader.entries()) == ["k"]


def test_an_empty_file_is_a_journal_that_was_being_created(path: Path) -> None:
    path.touch()
    with Journal.read_only(path) as reader:
        assert reader.entries() == {}
        assert reader.events() == []
        assert not reader.was_stopped()
    assert path.read_bytes() == b""


def test_a_file_that_cannot_be_created_is_the_tools_failure(tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(ToolFailure, match=r"missing/journal.sqlite:") as caught:
        Journal(tmp_path / "missing" / "journal.sqlite")
    sentence(caught)


def test_that_mbridge_was_told_to_stop_holds_until_the_next_driver(journal: Journal) -> None:
    assert not journal.was_stopped()
    journal.stopped()
    assert journal.was_stopped()
    journal.goes_on()
    assert not journal.was_stopped()


def test_a_row_whose_types_are_wrong_is_never_submitted_again(path: Path) -> None:
    """Tables that are not STRICT: another tool has copied them."""
    Journal(path).close()
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("DROP TABLE attempts")
    db.execute(
        "CREATE TABLE attempts (key, number, token, intended_at, job_id, submitted_at, started_at, ended_at, status,"
        " ending, failure)"
    )
    db.execute("INSERT INTO runs (key) VALUES ('k')")
    db.execute("INSERT INTO attempts (key, number, token) VALUES ('k', 'one', 5)")
    db.close()
    with Journal.read_only(path) as reader:
        entry = reader.entry("k")
    assert entry.damage == ("attempt one: the row is not of an attempt",)
    assert entry.last is not None
    assert entry.last.status is not None
    assert entry.last.status.is_final
    assert entry.last.ended_at is not None


@pytest.mark.parametrize("job_id", ["--user=root", "", "1 2", "x" * 300])
def test_what_is_not_a_job_id_is_not_passed_to_scancel(begun: Journal, job_id: str) -> None:
    begun.submitted("k", 1, job_id)
    entry = begun.entry("k")
    assert entry.last is not None
    assert entry.last.job_id is None
    assert entry.damage


@pytest.mark.parametrize("time", ["\n", "yesterday", "2026-13-01T00:00:00+00:00"])
def test_a_time_that_cannot_be_read_is_damage(begun: Journal, path: Path, time: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE attempts SET submitted_at = ?, ended_at = ?", (time, time))
    entry = begun.entry("k")
    assert entry.last is not None
    assert (entry.last.submitted_at, entry.last.ended_at) == (None, "")
    assert len(entry.damage) == 2


def test_a_journal_with_a_log_is_copied_without_its_holes(journal: Journal, path: Path) -> None:
    journal.plan(["k"])
    os.truncate(path, 1 << 42)
    with Journal.read_only(path) as reader:
        assert list(reader.entries()) == ["k"]


def test_a_value_without_bounds_is_damage(path: Path, sentence: Sentence) -> None:
    Journal(path).close()
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("DROP TABLE events")
    db.execute("CREATE TABLE events (at, key, text GENERATED ALWAYS AS (hex(zeroblob(50000000))))")
    db.execute("INSERT INTO events (at) VALUES ('a')")
    db.close()
    with Journal.read_only(path) as reader, pytest.raises(Damaged) as caught:
        reader.events()
    sentence(caught)
    with closing(Journal(path)) as writer, pytest.raises(Damaged) as caught:
        writer.events()
    sentence(caught)
