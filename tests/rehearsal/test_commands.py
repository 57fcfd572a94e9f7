"""`mbridge rehearse`, and `--rehearse` of dry-run and run, with a fake program of the rehearsal."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cloudai_mbridge as mb
from cloudai_mbridge import pipeline
from cloudai_mbridge.cli import cli
from cloudai_mbridge.commands.console import render_json
from cloudai_mbridge.rehearsal import RehearsalVerdict
from cloudai_mbridge.rehearsal import run as rehearsal_run
from tests.cases import every
from tests.commands.conftest import Run
from tests.golden import RUN_TIME, Sentence
from tests.rehearsal.conftest import GOOD, REFUSED, UNUSABLE, Write

pytestmark = pytest.mark.process
REPOSITORY = Path(__file__).parents[2]
STARTS = {"events": GOOD}
REFUSES = {"events": [*GOOD[:3], REFUSED], "code": 1}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, to see that none is left."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    return place


def test_a_line_for_each_point_and_nothing_written(
    scenario: Write, mbridge_here: Run, tmp_path: Path, temporary: Path, sentence: Sentence
) -> None:
    options = scenario({"good": STARTS, "bad": REFUSES, "none": {"events": [UNUSABLE], "code": 2}})
    before = sorted(tmp_path.iterdir())
    code, out, err = mbridge_here("rehearse", *options, "--output-dir", tmp_path / "out")
    assert (code, err) == (1, "")
    sentence(out)
    assert sorted(tmp_path.iterdir()) == before
    assert not [*temporary.iterdir()]


def test_a_terminal_shows_the_rank_that_is_being_built(
    scenario: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    result = cli.main(["rehearse", *scenario({"a": STARTS, "b": REFUSES})], standalone_mode=False)
    out, err = capsys.readouterr()
    assert result == 1
    shown = [line.rpartition("\x1b[K")[2] for line in err.split("\r")]
    assert "rehearsing point 1 of 2: rank 2 of 2 of a/single" in shown
    assert "rehearsing point 2 of 2: rank 1 of 2 of b/single" in shown
    assert err.endswith("\r\x1b[K")
    assert "starts a/single" in out


@every(("told", "code"), [({"a": STARTS}, 0), ({"a": STARTS, "b": {"code": 3}}, 0), ({"b": {"code": 3}}, 1)])
def test_the_exit_code_is_of_what_was_evaluated(told: Any, code: int, scenario: Write, mbridge_here: Run) -> None:
    assert mbridge_here("rehearse", *scenario(told))[0] == code


def test_json_has_every_rank_without_its_shards(scenario: Write, mbridge_here: Run) -> None:
    code, out, _ = mbridge_here("rehearse", *scenario({"a": STARTS, "b": REFUSES}), "--json")
    document = json.loads(out)
    assert code == 1
    assert [point["verdict"] for point in document["points"]] == ["starts", "refused"]
    assert [each["rank"] for each in document["points"][0]["built"]] == [0, 1]
    assert "shards" not in out
    assert document["points"][1]["refusals"][0]["keys"] == ["model.num_layers"]


def test_the_program_gets_what_the_job_would(scenario: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "note"
    note.mkdir()
    more = 'OWN = "a b $HOME"\nHF_TOKEN = "hf_abcdefghijklmnopqrstuvwxyzabcdefgh"\n'
    options = scenario({"a": STARTS | {"note": str(note)}, "b": STARTS | {"note": str(note)}}, test="mb = [1, 2]")
    text = (tmp_path / "scenario.toml").read_text()
    (tmp_path / "scenario.toml").write_text(text.replace("[Tests.extra_env_vars]\n", f"[Tests.extra_env_vars]\n{more}"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "mine")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    prepared = pipeline.plan(request(options))
    steps: list[Any] = []
    rehearsal = pipeline.rehearse(prepared, progress=steps.append)
    assert [point.name for point in rehearsal.points] == ["a/mb1", "a/mb2", "b/mb1", "b/mb2"]
    assert all(point.verdict is RehearsalVerdict.STARTS for point in rehearsal.points)
    started = [json.loads(path.read_text()) for path in note.glob("*.json")]
    assert len(started) == 2  # test b asks the same
    run = prepared.plan.runs[0]
    assert run.training_config in [each["config"] for each in started]
    sizes = ["--world", "2", "--gpu", "h100", "--gpus-per-node", "2", "--level", "states"]
    assert all(
        each["argv"] == ["-m", "cloudai_mbridge.training.dry", "--config", "training.json", *sizes] for each in started
    )
    env = started[0]["env"]
    assert env["OWN"] == f"a b {os.environ['HOME']}"
    assert "HF_TOKEN" not in env
    assert "SLURM_JOB_ID" not in env
    assert {name for name in run.recipe_env if name not in os.environ} <= env.keys()
    assert [(each.number, each.points) for each in steps if each.is_done] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [(each.built, each.ranks) for each in steps if each.number == 1] == [(0, 0), (0, 2), (1, 2), (2, 2), (2, 2)]


def test_the_api_returns_what_json_prints(scenario: Write, mbridge_here: Run, tmp_path: Path) -> None:
    options = scenario({"good": STARTS, "bad": REFUSES})
    lines: list[str] = []
    plan = mb.load(tmp_path / "scenario.toml", system=tmp_path / "system.toml").plan()
    rehearsal = plan.rehearse(progress=lines.append)
    assert [line.partition(":")[0] for line in lines] == ["starts good/single", "refused bad/single"]
    assert json.loads(render_json(rehearsal)) == json.loads(mbridge_here("rehearse", *options, "--json")[1])
    left = plan.rehearsed(rehearsal)
    assert isinstance(left, mb.Plan)
    assert [run.test_id for run in left.runs] == ["good"]
    assert left.to_pandas()["rules"].dropna().tolist() == ["R01"]


def request(options: tuple[str, ...], **more: Any) -> pipeline.Request:
    system, scenario = (Path(each.partition("=")[2]) for each in options)
    return pipeline.Request(system, scenario, None, None, **more)


def test_what_has_no_gpu_is_not_rehearsed(scenario: Write, sentence: Sentence) -> None:
    slurm = 'scheduler = "slurm"\ndefault_partition = "p"\npartitions = [{ name = "p" }]'
    for kind, system in (
        ('scheduler = "local"', ""),
        (slurm, ""),
        ('scheduler = "local"', 'gpu_type = "gpu9"'),
        ('scheduler = "local"', 'gpu_type = "cpu"'),
    ):
        (point,) = pipeline.rehearse(
            pipeline.plan(request(scenario({"a": STARTS}, scheduler=kind, system=system)))
        ).points
        assert point.verdict is RehearsalVerdict.NOT_EVALUATED
        sentence(point.reason)


def test_a_container_is_asked_by_this_python_and_rejects_nothing(scenario: Write, tmp_path: Path) -> None:
    slurm = 'scheduler = "slurm"\ndefault_partition = "p"\npartitions = [{ name = "p" }]'
    options = scenario({"a": REFUSES}, scheduler=slurm, test='container_image = "/images/x.sqsh"')
    prepared = pipeline.plan(request(options))
    (point,) = pipeline.rehearse(prepared).points
    assert (point.verdict, point.is_job_stack) == (RehearsalVerdict.NOT_EVALUATED, False)
    assert "not the image's" in point.reason
    assert len(pipeline.rehearsed(prepared, pipeline.rehearse(prepared)).plan.runs) == 1


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_point_has_a_time_limit(scenario: Write, tmp_path: Path, temporary: Path) -> None:
    told = {"a": {"events": GOOD[:3], "sleep": 1000, "note": str(tmp_path)}}
    prepared = pipeline.plan(request(scenario(told)))
    rehearsal = rehearsal_run.rehearse(prepared.plan, prepared.system, prepared.output_dir, limit_s=1.5)
    (point,) = rehearsal.points
    assert point.verdict is RehearsalVerdict.NOT_EVALUATED
    assert "(1 of 2 ranks built)" in point.reason
    (note,) = tmp_path.glob("*.json")
    assert not any(map(is_alive, json.loads(note.read_text())["pids"]))
    assert not [*temporary.iterdir()]


@every(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing(
    number: int, code: int, scenario: Write, tmp_path: Path, temporary: Path, until: Callable[..., Any]
) -> None:
    note = tmp_path / "note"
    note.mkdir()
    options = scenario({"a": {"events": GOOD[:3], "sleep": 1000, "note": str(note)}})
    words = [sys.executable, "-m", "cloudai_mbridge", "rehearse", *options, "--json"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY, text=True)
    until(lambda: [*note.glob("*.json")] or process.poll() is not None)
    time.sleep(0.2)
    process.send_signal(number)
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    assert json.loads(out)["error"]["exit_code"] == code
    assert "Traceback" not in err
    (found,) = note.glob("*.json")
    assert not any(map(is_alive, json.loads(found.read_text())["pids"]))
    assert not [*temporary.iterdir()]


@pytest.fixture
def until() -> Callable[..., Any]:
    def wait(is_true: Callable[[], Any]) -> None:
        end = time.monotonic() + 600
        while not is_true():
            assert time.monotonic() < end
            time.sleep(0.05)

    return wait


def test_dry_run_rejects_what_is_refused(
    scenario: Write, mbridge_here: Run, tmp_path: Path, sentence: Sentence
) -> None:
    options = (*scenario({"good": STARTS, "bad": REFUSES}), "--output-dir", str(tmp_path / "out"), "--rehearse")
    code, out, _ = mbridge_here("dry-run", *options)
    assert code == 0
    sentence(out, time=RUN_TIME)
    (root,) = (tmp_path / "out").iterdir()
    plan = json.loads((root / "plan.json").read_text())
    assert [run["test_id"] for run in plan["runs"]] == ["good"]
    (rejected,) = plan["rejected"]
    assert (rejected["test_id"], rejected["violations"][0]["rule_id"]) == ("bad", "R01")
    assert plan["rule_counts"] == {"R01": 1}
    assert json.loads((root / "rehearsal.json").read_text())["points"][0]["verdict"] == "starts"
    document = json.loads(mbridge_here("dry-run", *options, "--json")[1])
    assert [point["verdict"] for point in document["rehearsal"]["points"]] == ["starts", "refused"]


@every("command", ["dry-run", "run"])
def test_if_all_are_refused_nothing_is_written(
    command: str, scenario: Write, mbridge_here: Run, tmp_path: Path
) -> None:
    options = scenario({"bad": REFUSES})
    code, out, _ = mbridge_here(command, *options, "--output-dir", tmp_path / "out", "--rehearse")
    assert code == 1
    assert "every point is rejected: nothing was" in out
    assert "R01 model.num_layers" in out
    assert not (tmp_path / "out").exists()


def test_a_check_that_comes_first_must_start(scenario: Write, mbridge_here: Run, sentence: Sentence) -> None:
    options = scenario({"a": STARTS})
    prepared = pipeline.plan(request(options))
    rehearsal = pipeline.rehearse(prepared)
    assert rehearsal.succeeded
    code, _, err = mbridge_here("dry-run", *options, "--on-slurm")
    assert code == 2
    sentence(err)
    code, _, err = mbridge_here("rehearse", *options, "--on-slurm")
    assert code == 2
    sentence(err)
