"""Only regular files are read: whatever else lies at a path is refused at once."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.regular import NotRegular, copy_regular, open_regular, read_regular
from cloudai_mbridge.gate.baseline import load_baseline
from cloudai_mbridge.gate.history_file import open_for_writing
from cloudai_mbridge.gate.policy import load_policy
from cloudai_mbridge.gate.runs import read_results
from cloudai_mbridge.logs import read_log
from cloudai_mbridge.logs.tail import last_lines, tail_lines
from cloudai_mbridge.models.loading import load_system
from cloudai_mbridge.models.toml_source import read_toml
from cloudai_mbridge.plan import POINT_FILES
from cloudai_mbridge.plan.read import read_plan_data
from cloudai_mbridge.report.facts import read_overrides
from cloudai_mbridge.verdict.triage import triage
from tests.cases import every
from tests.golden import Sentence


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


KINDS: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "socket": _socket,
}


@pytest.fixture(params=KINDS)
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a path at which something else than a regular file lies."""
    KINDS[request.param](tmp_path / "odd")
    return tmp_path / "odd"


def test_it_is_refused(odd: Path, sentence: Sentence) -> None:
    with pytest.raises(NotRegular) as caught:
        open_regular(odd)
    sentence(caught)


def test_files_and_links_to_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"text"


def test_a_log_has_no_steps(odd: Path, sentence: Sentence) -> None:
    log = read_log(odd)
    assert (log.steps, last_lines(odd, 5), triage(None, [odd])) == ((), [], None)
    sentence("\n".join(log.notes))


READERS: dict[str, Callable[[Path], object]] = {
    "toml": read_toml,
    "system": load_system,
    "policy": load_policy,
    "baseline": load_baseline,
    "history": open_for_writing,
    "shown log": lambda path: list(tail_lines(path, 3, follow=False)),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_reader_says_it_in_one_line(odd: Path, sentence: Sentence, read: Callable[[Path], object]) -> None:
    with pytest.raises(BadInput) as caught:
        read(odd)
    sentence(caught)


LARGE = 1 << 42
WHOLE: dict[str, Callable[[Path], object]] = {
    **{name: read for name, read in READERS.items() if name not in ("history", "shown log")},
    "results": read_results,
    "plan": lambda path: read_plan_data(path.parent),
}


@every("read", WHOLE.values())
def test_no_reader_takes_a_file_of_any_size(tmp_path: Path, sentence: Sentence, read: Callable[[Path], object]) -> None:
    path = tmp_path / "plan.json"
    path.touch()
    os.truncate(path, LARGE)
    with pytest.raises(BadInput) as caught:
        read(path)
    sentence(caught)
    with pytest.raises(NotRegular) as caught:
        read_regular(path)
    sentence(caught)


def test_a_definition_of_any_size_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / POINT_FILES.definition).touch()
    os.truncate(tmp_path / POINT_FILES.definition, LARGE)
    assert read_overrides(tmp_path) is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "directory"])
def test_results(tmp_path: Path, sentence: Sentence, kind: str) -> None:
    KINDS[kind](tmp_path / "report.json")
    with pytest.raises(BadInput) as caught:
        read_results(tmp_path / "report.json")
    sentence(caught)


def _with_hole(path: Path, before: str, after: str) -> Path:
    """Write a file with a hole of 4 TiB between two texts, and another one behind them."""
    with path.open("wb") as file:
        file.write(before.encode())
        file.seek(LARGE)
        file.write(after.encode())
        file.truncate(2 * LARGE)
    return path


@pytest.mark.parametrize(
    ("count", "last"), [(1, ["five"]), (2, ["four", "five"]), (4, ["two", "three", "four", "five"])]
)
def test_the_last_lines_behind_a_hole_are_shown(tmp_path: Path, count: int, last: list[str]) -> None:
    path = _with_hole(tmp_path / "log", "one\ntwo\n", "three\nfour\nfive\n")
    shown = [line.strip("\\x0") for line in tail_lines(path, count + 1, follow=False)]  # the end is a line, too
    assert [line for line in shown if line] == last


def test_triage_passes_over_holes(tmp_path: Path) -> None:
    path = _with_hole(tmp_path / "log", "begun\n", "\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    os.truncate(path, LARGE + 100)
    failure = triage(None, [path])
    assert failure is not None
    assert "CUDA out of memory" in failure.evidence[0]


def test_a_copy_has_the_holes(tmp_path: Path) -> None:
    path = _with_hole(tmp_path / "file", "one", "two")
    copy_regular(path, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size == path.stat().st_size
    with (tmp_path / "copy").open("rb") as copy:
        assert copy.read(4) == b"one\0"
        copy.seek(LARGE)
        assert copy.read(4) == b"two\0"


def test_holes_are_passed_over(tmp_path: Path) -> None:
    record = 'MBRIDGE_STEP {"step": 1, "step_time_s": 0.5, "tflops_per_gpu": 1.0, "losses": {"lm loss": 5.0}}\n'
    with (tmp_path / "log").open("wb") as file:
        file.write(b"begun\n")
        file.seek(1 << 42)
        file.write(record.encode())
        file.truncate(1 << 43)
    assert [step.step for step in read_log(tmp_path / "log").steps] == [1]
