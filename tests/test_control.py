"""What `mbridge status`, `cancel` and `logs` find in a directory, while somebody may be driving it."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput, InUse, ToolFailure
from cloudai_mbridge.launch.claim import take_claim
from cloudai_mbridge.logs import tail
from cloudai_mbridge.logs.tail import tail_lines
from cloudai_mbridge.runner import Journal, control
from cloudai_mbridge.runner.journal import SubmissionLog
from cloudai_mbridge.runner.lock import clear_cancel, driver_lock, is_cancel_requested
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from tests.cases import every
from tests.golden import Sentence

RUNNING = JobStatus("RUNNING", JobClass.ACTIVE, nodes="n[1-2]", reason="why")
TOKEN = "0123456789abcdef"
KEYS = ("sweep/tp1/0", "sweep/tp1/1", "sweep/tp2/0", "long-tp2/single/0", "up/single/0")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    runs: list[dict[str, Any]] = [{"key": key, "upstream": {} if key.startswith("up/") else None} for key in KEYS]
    (tmp_path / "plan.json").write_text(json.dumps({"version": 2, "scenario": "s", "runs": runs}))
    for key in KEYS:
        (tmp_path / key).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def journal(root: Path) -> Iterator[Journal]:
    journal = Journal(root / "journal.sqlite")
    journal.plan(KEYS)
    yield journal
    journal.close()


# Status


def test_a_plan_that_was_not_run(root: Path) -> None:
    status = control.read_status(root)
    assert (status.scenario, status.driver, dict(status.counts)) == ("s", None, {"waiting": 5})
    assert [run.key for run in status.runs] == list(KEYS)
    assert not (root / "journal.sqlite").exists()  # to look changes nothing


def test_where_every_run_stands(root: Path, journal: Journal, sentence: Sentence) -> None:
    journal.intend([(KEYS[0], 1), (KEYS[1], 1)], "cafe")
    journal.submitted(KEYS[0], 1, "17")
    journal.saw(KEYS[0], 1, RUNNING)
    journal.decided(KEYS[2], "skipped", ["one", "two"])
    journal.intend([(KEYS[3], 1)], "beef")
    journal.saw(KEYS[3], 1, JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE))
    journal.intend([(KEYS[3], 2)], "f00d")
    journal.submitted(KEYS[3], 2, "19")
    journal.saw(KEYS[3], 2, JobStatus("COMPLETED", JobClass.SUCCEEDED))
    journal.decided(KEYS[3], "success", [])
    journal.exclude("n7", "down")
    status = control.read_status(root, with_events=True)
    seen = [(run.state, run.job_id, run.nodes, run.num_attempts, run.why) for run in status.runs]
    assert seen == [
        ("running", "17", "n[1-2]", 1, "why"),
        ("submitting", "", "", 1, ""),
        ("skipped", "", "", 0, "one; two"),
        ("success", "19", "", 2, ""),
        ("waiting", "", "", 0, ""),
    ]
    assert status.excluded == {"n7": "down"}
    sentence(status.events[-1].text)


def test_who_drives(root: Path) -> None:
    with driver_lock(root):
        assert (control.read_status(root).driver or "").startswith("process ")
    assert control.read_status(root).driver is None


def test_a_directory_without_a_run(tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        control.read_status(tmp_path)
    sentence(caught)


def test_a_journal_that_is_none(root: Path, sentence: Sentence) -> None:
    (root / "journal.sqlite").write_bytes(b"no database " * 100)
    with pytest.raises(BadInput) as caught:
        control.read_status(root)
    sentence(caught)


# Cancel


def test_nobody_to_ask(root: Path) -> None:
    assert control.cancel_run(root) is False
    assert not (root / "journal.sqlite").exists()


def test_the_driver_is_asked_and_waited_for(root: Path, journal: Journal) -> None:
    asked: list[bool] = []

    def end(lock: Any) -> None:
        for _ in range(2):  # the first is taken for one to an earlier driver
            wait_for(lambda: is_cancel_requested(root))
            asked.append(True)
            clear_cancel(root)
        lock.__exit__(None, None, None)

    lock = driver_lock(root)
    lock.__enter__()
    driver = threading.Thread(target=end, args=(lock,))
    driver.start()
    assert control.cancel_run(root) is True
    driver.join()
    assert asked == [True, True]
    assert not is_cancel_requested(root)


def test_a_driver_that_does_not_end(
    root: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    monkeypatch.setattr(control, "_CANCEL_WAIT_S", 0.1)
    with driver_lock(root), pytest.raises(ToolFailure) as caught:
        control.cancel_run(root)
    sentence(caught)


# Processes of another machine


def left_on(root: Path, journal: Journal, host: str, job_id: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave an attempt as a process on another machine has submitted it."""
    (root / "system.toml").touch()
    with monkeypatch.context() as patched:
        patched.setattr(socket, "gethostname", lambda: host)
        SubmissionLog(root).submitting(TOKEN, [(KEYS[0], 1)])
    journal.intend([(KEYS[0], 1)], TOKEN)
    if job_id is not None:
        journal.submitted(KEYS[0], 1, job_id)


@pytest.mark.parametrize("job_id", [f"17.{TOKEN}", f"launcher-17.{TOKEN}", None])
def test_processes_of_another_machine_are_left_to_it(
    root: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch, sentence: Sentence, job_id: str | None
) -> None:
    left_on(root, journal, "elsewhere", job_id, monkeypatch)
    if job_id is None:  # the driver was killed before it wrote down the id
        take_claim(root / KEYS[0], TOKEN, f"17.{TOKEN}")
    with pytest.raises(InUse) as caught:
        control.require_resumable(root)
    sentence(caught)
    control.require_resumable(root, ["elsewhere"])
    journal.saw(KEYS[0], 1, JobStatus("COMPLETED", JobClass.SUCCEEDED))
    control.require_resumable(root)


def test_processes_of_another_machine_without_a_journal(
    root: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    (root / "driver.lock").touch()
    with monkeypatch.context() as patched:
        patched.setattr(socket, "gethostname", lambda: "elsewhere")
        SubmissionLog(root).submitting(TOKEN, [(KEYS[0], 1)])
    take_claim(root / KEYS[0], TOKEN, f"17.{TOKEN}")
    with pytest.raises(InUse) as caught:
        control.require_resumable(root)
    sentence(caught)


def test_the_remedy_for_a_lost_journal(root: Path) -> None:
    (root / "driver.lock").touch()
    assert "restore it from a backup" in control.read_status(root).damage[0]
    SubmissionLog(root).submitting(TOKEN, [(KEYS[0], 1)])
    assert "mbridge resume rebuilds it from submissions.jsonl" in control.read_status(root).damage[0]


def test_jobs_of_slurm_are_everybodys(root: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    left_on(root, journal, "elsewhere", "17_3", monkeypatch)
    control.require_resumable(root)


def test_processes_of_this_machine_can_be_taken_up(
    root: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_on(root, journal, socket.gethostname(), f"17.{TOKEN}", monkeypatch)
    control.require_resumable(root)


def wait_for(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


# Which log


@pytest.mark.parametrize(
    ("point", "key"),
    [
        ("sweep/tp1/0", "sweep/tp1/0"),
        ("/sweep/tp1/1/", "sweep/tp1/1"),
        ("sweep/tp2", "sweep/tp2/0"),
        ("tp2", "sweep/tp2/0"),  # its point's name, and only a part of the other test's
        ("long", "long-tp2/single/0"),
        ("tp1/1", "sweep/tp1/1"),
    ],
)
def test_a_part_of_a_name_will_do(root: Path, point: str, key: str) -> None:
    assert control.find_log(root, point, None, stderr=False) == root / key / "stdout.txt"
    assert control.find_log(root, point, None, stderr=True) == root / key / "stderr.txt"


@pytest.mark.parametrize("point", ["tp1", "sweep", "single", "sweep/tp1/2", "nothing"])
def test_a_name_that_does_not_tell(root: Path, sentence: Sentence, point: str) -> None:
    with pytest.raises(BadInput) as caught:
        control.find_log(root, point, None, stderr=False)
    sentence(caught)


def test_the_upstream_launcher_has_a_log_of_its_own(root: Path) -> None:
    path = control.find_log(root, "up/single/0", None, stderr=False)
    assert path.name == "cloudai_megatron_bridge_launcher.log"
    assert control.find_log(root, "up/single/0", None, stderr=True).name == "stderr.txt"


def test_an_earlier_attempt(root: Path, sentence: Sentence) -> None:
    """The first of the three left no file behind."""
    (root / "sweep/tp2/0/attempt-2").mkdir()
    journal = Journal(root / "journal.sqlite")
    journal.plan(["sweep/tp2/0"])
    for number in (1, 2, 3):
        journal.intend([("sweep/tp2/0", number)], f"token{number}")
    journal.close()
    for attempt, directory in ((None, "."), (1, "attempt-1"), (2, "attempt-2"), (3, ".")):
        path = control.find_log(root, "sweep/tp2", attempt, stderr=False)
        assert path == root / "sweep/tp2/0" / directory / "stdout.txt"
    for attempt in (0, 4, -1):
        with pytest.raises(BadInput) as caught:
            control.find_log(root, "sweep/tp2", attempt, stderr=False)
        sentence(caught)


# Its lines

BLOCK = tail._BLOCK
LOGS = {
    "empty": b"",
    "one": b"a\n",
    "three": b"a\nb\nc\n",
    "blank": b"a\n\n\n",
    "crlf": b"a\r\nb\r\nc\r\n",
    "long lines": b"x" * BLOCK + b"\n" + b"y" * (2 * BLOCK + 7) + b"\nz\n",
    "many": b"".join(b"line %d\n" % i for i in range(20_000)),
    "at the edge": b"a\n" * BLOCK,
    "control": b"a\x1b[31mb\n\xff\n",
}
COUNTS = [None, 0, 1, 2, 3, 19_999, 10**6]


def _lines(data: bytes) -> list[str]:
    """Split naively."""
    lines = data.replace(b"\r\n", b"\n").decode(errors="replace").split("\n")
    shown = [line.replace("\x1b", "\\x1b") for line in lines]
    return shown[:-1] if shown[-1] == "" else shown


def _last(lines: list[str], count: int | None) -> list[str]:
    return lines if count is None else lines[max(0, len(lines) - count) :]


@every("count", COUNTS)
@every("name", LOGS)
def test_the_last_lines(tmp_path: Path, name: str, count: int | None) -> None:
    (tmp_path / "log").write_bytes(LOGS[name])
    assert list(tail_lines(tmp_path / "log", count, follow=False)) == _last(_lines(LOGS[name]), count)


@every("count", [None, 3, 10**6])
@every("name", ["three", "many", "blank"])
def test_all_lines_of_a_log_without_a_newline_at_its_end(tmp_path: Path, name: str, count: int | None) -> None:
    data = LOGS[name] + b"the end"
    if count == 3:
        data = b"a\nb\nthe end"
    (tmp_path / "log").write_bytes(data)
    assert list(tail_lines(tmp_path / "log", count, follow=False)) == _last(_lines(data), count)


@every("count", [0, 1, 2])
@every("name", ["three", "many", "blank", "long lines"])
def test_the_last_lines_of_a_log_without_a_newline_at_its_end(tmp_path: Path, name: str, count: int) -> None:
    data = LOGS[name] + b"the end"
    (tmp_path / "log").write_bytes(data)
    assert list(tail_lines(tmp_path / "log", count, follow=False)) == _last(_lines(data), count)


def test_a_log_that_is_not_there(tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        list(tail_lines(tmp_path / "log", 5, follow=False))
    sentence(caught)


def _append(path: Path, text: str) -> None:
    with path.open("a") as log:
        log.write(text)


def test_a_log_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "_FOLLOW_S", 0.01)
    path = tmp_path / "log"
    threading.Timer(0.05, lambda: path.write_text("a\nb\n")).start()
    lines = tail_lines(path, None, follow=True)
    assert [next(lines), next(lines)] == ["a", "b"]
    _append(path, "hal")
    threading.Timer(0.05, _append, (path, "f\nlast\n")).start()
    assert [next(lines), next(lines)] == ["half", "last"]


def test_a_line_longer_than_a_mebibyte_comes_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"a\n" + b"x" * (20 << 20) + b"\nb\n")
    first, *pieces, last = tail_lines(tmp_path / "log", None, follow=False)
    assert (first, last, sum(map(len, pieces))) == ("a", "b", 20 << 20)
    assert all(len(piece) < 2 << 20 for piece in pieces)
