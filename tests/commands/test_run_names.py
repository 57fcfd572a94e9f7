"""Runs by name: what is found, where, and what a name may not mean."""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cloudai_mbridge.cli import cli
from cloudai_mbridge.commands.options import as_near_run, as_run, find_run, find_runs
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.run_files import record_run, started_at
from cloudai_mbridge.plan import read
from tests.golden import Sentence


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and no runs elsewhere."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MBRIDGE_RESULTS", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def a_run(directory: Path, name: str, *, dry_run: bool = False) -> Path:
    root = directory / name
    root.mkdir(parents=True)
    (root / "plan.json").write_text(json.dumps({"version": 2, "scenario": "s", "runs": [], "dry_run": dry_run}))
    return root


def day(number: int, scenario: str = "s") -> str:
    return f"{scenario}_2026-11-{number:02}_02-00-00"


def test_runs_of_all_places_newest_first(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, third = a_run(here / "results", day(1)), a_run(here / "results", day(3))
    second, fourth = a_run(tmp_path / "shared", day(2)), a_run(tmp_path / "out", day(4))
    (here / "results" / "history.sqlite").touch()
    (here / "results" / "notes").mkdir()
    (here / "results" / "linked").symlink_to(first)
    monkeypatch.setenv("MBRIDGE_RESULTS", str(tmp_path / "shared"))
    for root in (fourth, tmp_path / "removed", third):
        record_run(root)
    assert find_runs() == [fourth, third, second, first]
    assert find_runs(tmp_path / "shared") == [second]
    assert find_run("latest") == fourth


@pytest.mark.process
def test_names_sort_the_same_in_every_time_zone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run starts in a shell whose clock is 25 hours behind that of the first."""
    files = Path(__file__).parents[2]
    scenario = ["--system-config", str(files / "systems/local.toml"), "--tests-dir", str(files / "test_defs")]
    scenario += ["--test-scenario", str(files / "conf/scenarios/gpt_tiny_sweep.toml"), "--output-dir", "results"]
    runs: list[Path] = []
    for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert CliRunner().invoke(cli, ["dry-run", *scenario]).exit_code == 0
        runs += [run for run in find_runs(here / "results") if run not in runs]
    monkeypatch.undo()
    time.tzset()
    assert find_runs(runs[0].parent) == runs[::-1]
    assert started_at(runs[1])[0] - started_at(runs[0])[0] < timedelta(minutes=10)


def test_newest_is_by_name_also_within_a_second(here: Path) -> None:
    """A copy has new times and the old name; a renamed directory has only the time of its plan."""
    numbered = [a_run(here / "results", f"{day(1)}{suffix}") for suffix in ("", "_2", "_10")]
    other = a_run(here / "results", day(2, "a_scenario"))
    renamed = a_run(here / "results", "good-one")
    os.utime(renamed / "plan.json", (0, 0))
    assert find_runs() == [other, *reversed(numbered), renamed]


def test_latest_is_no_dry_run(here: Path) -> None:
    real = a_run(here / "results", day(1))
    dry = a_run(here / "results", day(2), dry_run=True)
    assert find_run("latest") == real
    assert find_run(day(2)) == dry


def test_no_latest(here: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    with pytest.raises(BadInput) as error:
        find_run("latest")
    sentence(error)
    a_run(here / "results", day(2), dry_run=True)
    with pytest.raises(BadInput, match=r"latest:") as caught:
        find_run("latest")
    sentence(caught)


def test_a_damaged_run_can_be_the_latest(here: Path) -> None:
    """The command then says what is wrong with it, instead of taking an older one."""
    a_run(here / "results", day(1))
    damaged = a_run(here / "results", day(2))
    (damaged / "plan.json").write_text("{")
    incomplete = here / "results" / day(3)
    assert find_run("latest") == damaged
    incomplete.mkdir()
    assert find_run("latest") == incomplete


def test_the_beginning_of_a_name(here: Path, sentence: Sentence) -> None:
    tiny, again, small = (a_run(here / "results", name) for name in (day(1, "t"), f"{day(1, 't')}_1", day(2, "small")))
    assert find_run("sm") == small
    assert find_run(day(1, "t")) == tiny, "the whole name of one is the beginning of the other's"
    assert find_run(again.name) == again
    with pytest.raises(BadInput) as error:
        find_run("t_2026")
    sentence(error)
    with pytest.raises(BadInput, match=r"'tini':") as caught:
        find_run("tini")
    sentence(caught)


def test_many_candidates(here: Path, sentence: Sentence) -> None:
    for number in range(1, 10):
        a_run(here / "results", day(number))
    with pytest.raises(BadInput) as error:
        find_run("s")
    sentence(error)


def test_the_same_name_in_two_places(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    roots = {a_run(here / "results", day(1)), a_run(tmp_path / "shared", day(1))}
    monkeypatch.setenv("MBRIDGE_RESULTS", str(tmp_path / "shared"))
    with pytest.raises(BadInput) as error:
        find_run(day(1))
    sentence(error)
    assert all(str(root) in str(error.value) for root in roots)


def test_a_name_is_never_of_another_users_run(here: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    """`resume` executes what lies in a directory: somebody else's must not become `latest`."""
    own = a_run(here / "results", day(1))
    a_run(here / "results", day(2))
    monkeypatch.setattr(read, "_is_own", lambda root: root == own)
    assert find_run("latest") == own
    assert find_run("s_2026") == own
    with pytest.raises(BadInput) as error:
        find_run(day(2))
    sentence(error)


def test_own_is_by_user(here: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    own = a_run(here / "results", day(1))
    assert find_run("latest") == own
    monkeypatch.setattr(os, "geteuid", lambda: own.stat().st_uid + 1)
    with pytest.raises(BadInput) as caught:
        find_run("latest")
    sentence(caught)


def test_a_path_that_exists_wins(here: Path, capsys: pytest.CaptureFixture[str], sentence: Sentence) -> None:
    root = a_run(here / "results", day(1))
    assert as_run("latest") == root
    sentence(capsys.readouterr().err)
    for name in ("latest", day(1), "broken"):
        (here / name).symlink_to("nowhere")
        assert as_run(name) == Path(name)
    for path in ("", ".", f"results/{day(1)}", "results/none"):
        assert as_run(path) == Path(path)
    assert capsys.readouterr().err == ""


def test_what_a_name_says_cannot_control_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(here / "results", day(1, "\x1b[31m"))
    as_run("\x1b")
    assert "\x1b" not in capsys.readouterr().err
    a_run(here / "results", day(2, "\x1b[31m"))
    for name in ("\x1b", "\x1bx"):
        with pytest.raises(BadInput) as error:
            find_run(name)
        assert "\x1b" not in str(error.value)


COMMANDS = [
    *("resume", "status", "cancel", "logs", "gate", "compare", "baseline promote", "history import", "nodes show"),
    *("calibrate", "generate-report"),
]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_on_a_run_takes_names(name: str) -> None:
    command: click.Command = cli
    for word in name.split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found
        command = found
    functions = {getattr(parameter.type, "func", None) for parameter in command.params}
    assert (as_near_run if name == "cancel" else as_run) in functions
    text = " ".join(command.get_help(click.Context(command)).split())
    assert "RUN is the directory of a run, the beginning of its name (see `mbridge runs`), or `latest`." in text
    assert text.count("RUN is the directory") == 1


def test_what_ends_jobs_takes_no_latest_of_another_project(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    other = a_run(tmp_path / "elsewhere", day(4))
    record_run(other)
    assert as_run("latest") == other
    with pytest.raises(BadInput, match=r"latest:") as caught:
        as_near_run("latest")
    sentence(caught)
    assert as_near_run(day(4)) == other
    assert as_near_run(str(other)) == other
    monkeypatch.setenv("MBRIDGE_RESULTS", str(tmp_path / "elsewhere"))
    assert as_near_run("latest") == other
    monkeypatch.delenv("MBRIDGE_RESULTS")
    own = a_run(here / "results", day(5))
    assert as_near_run("latest") == own
    (here / "latest").mkdir()
    assert as_near_run("latest") == Path("latest")
    result = CliRunner().invoke(cli, ["cancel", "--help"])
    assert "refused for a run outside" in " ".join(result.output.split())
