"""The journal survives the process that wrote it."""

import sqlite3
from datetime import datetime
from pathlib import Path

import pytest

from cloudai_mbridge.jobs import JobClass, JobStatus
from cloudai_mbridge.runner import Journal


def _reopened(path: Path) -> dict[str, tuple[str | None, JobStatus | None]]:
    journal = Journal(path)
    try:
        return {key: (entry.job_id, entry.status) for key, entry in journal.entries().items()}
    finally:
        journal.close()


def test_every_change_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.plan(["a/x/0", "b/y/0"])
    assert _reopened(path) == {"a/x/0": (None, None), "b/y/0": (None, None)}
    journal.submitted("a/x/0", "17")
    assert _reopened(path)["a/x/0"] == ("17", None)
    running = JobStatus("RUNNING", JobClass.ACTIVE, nodes="n[1-2]")
    journal.saw("a/x/0", running)
    assert _reopened(path)["a/x/0"] == ("17", running)
    failed = JobStatus("FAILED", JobClass.FAILED, exit_code=0, signal=9, reason='it\'s "over"; --', nodes="n1")
    journal.saw("a/x/0", failed)
    journal.close()
    assert _reopened(path) == {"a/x/0": ("17", failed), "b/y/0": (None, None)}


@pytest.mark.parametrize("job_class", JobClass)
def test_every_class_comes_back(tmp_path: Path, job_class: JobClass) -> None:
    journal = Journal(tmp_path / "j")
    journal.plan(["k"])
    journal.saw("k", JobStatus("X", job_class))
    journal.close()
    status = _reopened(tmp_path / "j")["k"][1]
    assert status is not None
    assert status.job_class is job_class


def test_the_times_of_a_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.plan(["k"])
    assert (journal.entries()["k"].submitted_at, journal.entries()["k"].ended_at) == (None, None)
    journal.submitted("k", "1")
    journal.saw("k", JobStatus("RUNNING", JobClass.ACTIVE))
    entry = journal.entries()["k"]
    assert entry.submitted_at is not None
    assert entry.ended_at is None
    journal.saw("k", JobStatus("COMPLETED", JobClass.SUCCEEDED))
    entry = journal.entries()["k"]
    journal.close()
    assert entry.submitted_at is not None
    assert entry.ended_at is not None
    assert datetime.fromisoformat(entry.submitted_at) <= datetime.fromisoformat(entry.ended_at)
    assert datetime.fromisoformat(entry.ended_at).tzinfo is not None


def test_a_key_is_planned_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.plan(["k"])
    with pytest.raises(sqlite3.IntegrityError):
        journal.plan(["k"])
    journal.close()


def test_keys_are_data(tmp_path: Path) -> None:
    keys = ["'; DROP TABLE runs; --", "é😀", ""]
    journal = Journal(tmp_path / "j")
    journal.plan(keys)
    journal.submitted(keys[0], "'")
    journal.close()
    assert {key: job for key, (job, _) in _reopened(tmp_path / "j").items()} == {
        keys[0]: "'",
        keys[1]: None,
        keys[2]: None,
    }
