"""The index of a user's runs: it is written where XDG says, and nothing fails without it."""

from pathlib import Path

import pytest

from cloudai_mbridge.files.run_files import index_path, record_run, recorded_runs
from tests.cases import every


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_runs_are_added_in_order(state: Path) -> None:
    assert recorded_runs() == []
    paths = [Path("/a/s_1"), Path("/a b/\udcff"), Path("/a/s_1")]
    for path in paths:
        record_run(path)
    assert recorded_runs() == paths
    assert (state / "mbridge" / "runs.txt").read_bytes() == b"/a/s_1\n/a b/\xff\n/a/s_1\n"


def test_a_path_of_two_lines_is_not_recorded() -> None:
    record_run(Path("/a\n/b"))
    assert recorded_runs() == []


def test_what_no_run_can_be_is_not_read(state: Path) -> None:
    record_run(Path("/a"))
    with (state / "mbridge" / "runs.txt").open("ab") as file:
        file.write(b"relative\n\n/nul\0\n/b\n/cut o")
    assert recorded_runs() == [Path("/a"), Path("/b")]


def test_only_the_last_ones_are_read(state: Path) -> None:
    record_run(Path("/first"))
    with (state / "mbridge" / "runs.txt").open("a") as file:
        file.writelines(f"/{number}\n" for number in range(1000))
    assert recorded_runs() == [Path(f"/{number}") for number in range(1000)]


@every("home", ["/home/me", "relative", None])
def test_a_relative_state_directory_is_none(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a home, HOME unset and the user unknown, `~` stays as it is."""
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setattr("os.path.expanduser", lambda path: path.replace("~", home) if home else path)
    assert index_path() == (Path("/home/me/.local/state/mbridge/runs.txt") if home == "/home/me" else None)
    if home != "/home/me":
        record_run(Path("/a"))
        assert recorded_runs() == []


def test_nothing_fails_where_it_cannot_be_written(state: Path) -> None:
    state.write_text("a file in its place")
    record_run(Path("/a"))
    assert recorded_runs() == []
