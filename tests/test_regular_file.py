"""Only regular files are read: whatever else lies at a path is refused at once."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudai_mbridge import control
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.gate.baseline import load_baseline
from cloudai_mbridge.gate.history_file import open_for_writing
from cloudai_mbridge.gate.policy import load_policy
from cloudai_mbridge.gate.results import read_results
from cloudai_mbridge.logs import read_log
from cloudai_mbridge.logs.tail import last_lines
from cloudai_mbridge.models.load import load_system
from cloudai_mbridge.models.toml_source import read_toml
from cloudai_mbridge.regular_file import NotRegular, open_regular, read_regular
from cloudai_mbridge.verdict.triage import triage_logs


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (os.mkfifo, "a FIFO"),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "directory": (Path.mkdir, "a directory"),
    "socket": (_socket, "a socket"),
}


@pytest.fixture(params=KINDS)
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """Return a path at which something else than a regular file lies, and what that is."""
    make, words = KINDS[request.param]
    make(tmp_path / "odd")
    return tmp_path / "odd", words


def test_it_is_refused(odd: tuple[Path, str]) -> None:
    path, words = odd
    with pytest.raises(NotRegular, match=f"{words}, not a regular file"):
        open_regular(path)


def test_files_and_links_to_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"text"


def test_a_log_has_no_steps(odd: tuple[Path, str]) -> None:
    path, words = odd
    log = read_log(path)
    assert (log.steps, log.notes) == ((), (f"odd cannot be read ({words}, not a regular file)",))
    assert (last_lines(path, 5), triage_logs([path])) == ([], None)


READERS: dict[str, Callable[[Path], object]] = {
    "toml": read_toml,
    "system": load_system,
    "policy": load_policy,
    "baseline": load_baseline,
    "history": open_for_writing,
    "shown log": lambda path: list(control.read_lines(path, 3, follow=False)),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_reader_says_it_in_one_line(odd: tuple[Path, str], read: Callable[[Path], object]) -> None:
    path, words = odd
    with pytest.raises(BadInput, match=words):
        read(path)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "directory"])
def test_results(tmp_path: Path, kind: str) -> None:
    make, words = KINDS[kind]
    make(tmp_path / "report.json")
    with pytest.raises(BadInput, match=words):
        read_results(tmp_path / "report.json")


def test_holes_are_passed_over(tmp_path: Path) -> None:
    record = 'MBRIDGE_STEP {"step": 1, "step_time_s": 0.5, "tflops_per_gpu": 1.0, "losses": {"lm loss": 5.0}}\n'
    with (tmp_path / "log").open("wb") as file:
        file.write(b"begun\n")
        file.seek(1 << 42)
        file.write(record.encode())
        file.truncate(1 << 43)
    assert [step.step for step in read_log(tmp_path / "log").steps] == [1]
