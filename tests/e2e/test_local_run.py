"""The whole line on this machine, as `make run` goes it; its host name does not resolve, where that can be had.

All points of the shipped sweep, with a third of its micro-batches; `make test-long` runs it as it is.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cloudai_mbridge.report.text import with_error

pytest.importorskip("torch")


NO_SUCH_NAME = ("--uts", "hostname no-such-host")


@pytest.fixture(scope="module")
def here(namespace: Any, repository: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run mbridge where the host name does not resolve, if that can be had: here("run", ...)."""
    prefix: list[str] = []
    with suppress(pytest.skip.Exception):
        prefix = namespace(*NO_SUCH_NAME)

    def run(*args: Any) -> "subprocess.CompletedProcess[str]":
        command = [*prefix, sys.executable, "-m", "cloudai_mbridge", *map(str, args)]
        return subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=1500, check=False)

    return run


STEPS, WARM_UP = 8, 3
SHORTER = {"gb = 8": "gb = 4", "max_steps = 12": f"max_steps = {STEPS}"}


def run_sweep(here: Any, repository: Path, tests: Path, out: Path) -> Any:
    """Run the shipped scenario with the tests of a directory; return (process, report.json, root of the run)."""
    done = here(
        "run",
        *("--system-config", repository / "systems/local.toml"),
        *("--tests-dir", tests),
        *("--test-scenario", repository / "conf/scenarios/gpt_tiny_sweep.toml"),
        *("--output-dir", out),
    )
    (root,) = out.iterdir()
    return done, json.loads((root / "report.json").read_text()), root


@pytest.fixture(scope="module")
def sweep(here: Any, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any], Path]:
    """Run the sweep once: (process, report.json, root of the run)."""
    tests = tmp_path_factory.mktemp("tests")
    text = (repository / "test_defs/gpt_tiny_sweep.toml").read_text()
    for shipped, shorter in SHORTER.items():
        assert text.count(shipped) == 1
        text = text.replace(shipped, shorter)
    (tests / "gpt_tiny_sweep.toml").write_text(text)
    return run_sweep(here, repository, tests, tmp_path_factory.mktemp("sweep"))


def check_it_trains(done: Any, report: dict[str, Any], steps: int, falls_by: float) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["summary"] == {"success": 6, "failed": 0, "skipped": 0, "rejected": 6}
    for point in report["points"]:
        if point["verdict"] == "success":
            losses = [step["loss"] for step in point["steps"]]
            assert len(losses) == point["num_steps"] == steps
            assert losses[-1] < losses[2] - falls_by


def test_every_accepted_point_trains_and_the_run_succeeds(sweep: Any) -> None:
    done, report, _ = sweep
    check_it_trains(done, report, STEPS, falls_by=0.2)


@pytest.mark.long
def test_the_shipped_sweep_trains_as_it_is(here: Any, repository: Path, tmp_path: Path) -> None:
    done, report, _ = run_sweep(here, repository, repository / "test_defs", tmp_path)
    check_it_trains(done, report, 12, falls_by=0.3)


def test_its_host_name_does_not_resolve(namespace: Any) -> None:
    """That nothing waits for it: test_no_host_name.py counts the questions to a name server."""
    look_up = "import socket; socket.gethostbyname(socket.gethostname())"
    done = subprocess.run([*namespace(*NO_SUCH_NAME), sys.executable, "-c", look_up], capture_output=True, text=True)
    assert "socket.gaierror" in done.stderr


def test_rejected_points_name_rule_and_operands_before_anything_runs(sweep: Any) -> None:
    done, _, _ = sweep
    before, _, _ = done.stdout.partition("results:")
    assert "rejected by C01: 3 points; such as sweep/tp2-pp2-mb1: C01 cmd_args.num_gpus: " in before
    assert "rejected by C04: " in before
    assert "every rejected point: --rejected\n" in before


def test_the_ending_shows_the_numbers_of_the_report(sweep: Any) -> None:
    done, report, _ = sweep
    for point in report["points"]:
        if point["verdict"] == "success":
            row = next(line for line in done.stdout.splitlines() if line.startswith(f"{point['label']} "))
            for name in ("step_time_s", "tflops_per_gpu"):
                statistic = point["metrics"][name]
                mean, std = (statistic.get(f"capped_{of}", statistic[of]) for of in ("mean", "std"))
                assert f" {with_error(mean, std)} " in f"{row} "


def test_numbers_agree_with_each_other_and_with_the_printed_lines(sweep: Any) -> None:
    _, report, root = sweep
    for point in report["points"]:
        if point["verdict"] != "success":
            continue
        flops, world = point["run"]["flops_per_step"], point["world_size"]
        log = (root / point["log"]["file"]).read_text()
        printed = [float(t) for t in re.findall(r"^Step Time : ([\d.]+)s GPU", log, re.MULTILINE)]
        assert printed == [round(step["step_time_s"], 2) for step in point["steps"]]
        for step in point["steps"]:
            assert step["tflops_per_gpu"] == pytest.approx(flops / step["step_time_s"] / world / 1e12, rel=1e-9)
        counted = [step["step_time_s"] for step in point["steps"] if step["step"] > WARM_UP]
        assert point["metrics"]["step_time_s"]["n"] == len(counted) == STEPS - WARM_UP
        assert point["metrics"]["step_time_s"]["mean"] == pytest.approx(sum(counted) / len(counted))


def test_the_report_is_what_the_schema_says(sweep: Any, repository: Path) -> None:
    _, report, root = sweep
    schema = json.loads((repository / "cloudai_mbridge/report/report.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(report)
    runs = [point for point in report["points"] if point["verdict"] == "success"]
    assert len({point["comparability"]["id"] for point in runs}) == len(runs) == 6
    for point in runs:
        assert point["environment"]["packages"]["torch"] == point["run"]["torch"]
        assert point["environment"]["nodes"] == [report["environment"]["hostname"]]
        assert 0.1 < point["metrics"]["peak_memory_gib"] < 8
    for name in ("report.html", "report.md", "report.txt", "junit.xml", "steps.csv"):
        assert (root / name).stat().st_size > 100


def test_equal_work_gives_equal_losses(sweep: Any) -> None:
    _, report, _ = sweep
    curves = [[s["loss"] for s in p["steps"]] for p in report["points"] if p["verdict"] == "success"]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-4)


def test_generate_report_gives_the_same_report_again(sweep: Any, here: Any) -> None:
    _, report, root = sweep
    assert here("generate-report", "--result-dir", root).returncode == 0
    again = json.loads((root / "report.json").read_text())
    assert {**again, "created_at": "", "digest": ""} == {**report, "created_at": "", "digest": ""}


def test_a_point_can_be_run_again_from_its_own_definition(sweep: Any, mbridge: Any, tmp_path: Path) -> None:
    _, _, root = sweep
    (tmp_path / "tests").mkdir()
    text = (root / "sweep/tp2-pp1-mb2/0/test.toml").read_text()
    (tmp_path / "tests/again.toml").write_text(text)
    (tmp_path / "s.toml").write_text('name = "again"\n[[Tests]]\nid = "x"\ntest_name = "gpt_tiny_sweep-tp2-pp1-mb2"\n')
    (tmp_path / "local.toml").write_text('name = "local"\nscheduler = "local"\n')
    done = mbridge(
        "dry-run",
        *("--system-config", tmp_path / "local.toml", "--tests-dir", tmp_path / "tests"),
        *("--test-scenario", tmp_path / "s.toml", "--output-dir", tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr
    (again,) = (tmp_path / "out").iterdir()
    first = (root / "sweep/tp2-pp1-mb2/0/training.json").read_text()
    assert (again / "x/single/0/training.json").read_text() == first
