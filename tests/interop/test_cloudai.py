"""MegatronBridgeEmbedded in the real CloudAI: every command, on a real Slurm cluster and on this machine."""

import ast
import csv
import json
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cloudai.core import METRIC_ERROR, Registry
from cloudai.models.scenario import TestRunDetails

from cloudai_mbridge.integrations.cloudai import TEMPLATE, register

CACHED = "--enable-cache-without-check"
# of the values of a variable, CloudAI makes an axis, too
ONE_FAILS = 'STAND_IN = [\'{}\', \'{"say": "torch.OutOfMemoryError: CUDA out of memory.", "exit": 1}\']'


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    assert register(), register().message


def point(place: Any, step: int | None = 1) -> Path:
    return place.results / "points/0" / (str(step) if step else "")


def status_of(ended: "subprocess.CompletedProcess[str]") -> dict[str, int]:
    """Return how often CloudAI's status report says PASSED and FAILED."""
    return {word: ended.stdout.count(f"│ {word} │") for word in ("PASSED", "FAILED")}


def trajectory_of(place: Any) -> list[dict[str, Any]]:
    """Return the rows of CloudAI's table of a sweep: step, action, reward, observation."""
    with (place.results / "points/0/trajectory.csv").open() as file:
        return [{name: ast.literal_eval(text) for name, text in row.items()} for row in csv.DictReader(file)]


def test_it_is_registered_once_and_beside_cloudai_s_own() -> None:
    assert register().message == f"{TEMPLATE} is already registered"
    assert {TEMPLATE, "MegatronBridge"} <= Registry().test_definitions_map.keys()


def test_the_console_script_is_cloudai_s_command_line() -> None:
    script = Path(sys.executable).parent / "mbridge-cloudai"
    said = subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout
    assert "CloudAI is a benchmark framework" in said


def test_verify_configs(place: Any) -> None:
    place.write("gb = [2, 4]\ntp = [1, 2]")
    good = place.call("verify-configs", ".")
    assert "Checked 4 configuration files, all passed" in good.stdout
    place.write("no_such_key = 1")
    bad = place.call("verify-configs", ".")
    assert "1 out of 1 test configurations have issues" in bad.stdout
    assert "cmd_args.no_such_key" in bad.stdout


def test_cloudai_alone_does_not_know_it(place: Any) -> None:
    """What the console script adds is the workload, and nothing else."""
    ended = subprocess.run(
        [sys.executable, "-c", "from cloudai.cli import main; main()", "verify-configs", "tests"],
        cwd=place.directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"TestTemplate with name '{TEMPLATE}' not supported" in ended.stdout


@pytest.mark.slurm
def test_dry_run(cluster_place: Any) -> None:
    """It writes what `run` submits, and CloudAI's description of it, and submits nothing."""
    ended = cluster_place.run("dry-run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    details = TestRunDetails.model_validate(tomllib.loads((point(cluster_place, None) / "test-run.toml").read_text()))
    assert details.test_definition.cmd_args.model_recipe_name == "gpt_tiny"
    assert "-m cloudai_mbridge.training" in details.test_cmd
    assert details.full_cmd.startswith("srun ")
    assert "exec bash job.sbatch" in (point(cluster_place, None) / "cloudai_sbatch_script.sh").read_text()
    assert not list(cluster_place.results.rglob("started.txt"))


@pytest.mark.slurm
def test_one_failing_point(cluster_place: Any) -> None:
    """Exit code, CloudAI's status, its trajectory and its tarball say so; the other points go on."""
    cluster_place.write("gb = [2, 4]", ONE_FAILS)
    ended = cluster_place.run("run", CACHED)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert status_of(ended) == {"PASSED": 2, "FAILED": 2}
    assert "MegatronBridgeEmbedded: 2 of 4 points failed" in ended.stderr
    failed = [line.strip() for line in ended.stderr.splitlines()[1:]]
    assert all("report.json" in os.listdir(path) for path in failed)
    assert [row["reward"] > 0 for row in trajectory_of(cluster_place)] == [True, False, True, False]
    with tarfile.open(cluster_place.results.with_name(cluster_place.results.name + ".tgz")) as tar:
        assert any(name.endswith("report.json") for name in tar.getnames())

    again = cluster_place.run("generate-report", "--result-dir", str(cluster_place.results))
    assert again.returncode == 1, again.stdout + again.stderr
    assert status_of(again) == {"PASSED": 2, "FAILED": 2}


@pytest.mark.slurm
def test_points_that_a_rule_rejects(cluster_place: Any) -> None:
    """In a sweep they are skipped; alone they end in one line, before anything is submitted."""
    cluster_place.write("gb = [2, 3]\nmb = 2")
    ended = cluster_place.run("run", CACHED)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Constraint check failed. Skipping step." in ended.stdout
    assert status_of(ended) == {"PASSED": 1, "FAILED": 0}

    cluster_place.write("gb = 3\nmb = 2")
    ended = cluster_place.run("run", CACHED, "--output-dir", "elsewhere")
    assert ended.returncode == 2
    assert ended.stderr.startswith("Error: points: C04 ")
    assert "Traceback" not in ended.stdout + ended.stderr
    assert not list((cluster_place.directory / "elsewhere").iterdir())


@pytest.mark.slurm
def test_single_sbatch(cluster_place: Any) -> None:
    """All points in CloudAI's one job."""
    cluster_place.write("gb = [2, 3, 4]\nmb = [1, 2]", ONE_FAILS)
    ended = cluster_place.run("run", CACHED, "--single-sbatch")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "MegatronBridgeEmbedded: 5 of 10 points failed" in ended.stderr
    assert len(list(cluster_place.results.rglob("exit_code.txt"))) == 10
    assert tomllib.loads((cluster_place.results / "slurm-job.toml").read_text())["is_single_sbatch"]
    assert len(trajectory_of(cluster_place)) == 10


@pytest.mark.slurm
def test_what_a_toml_holds_reaches_the_trainer_as_data(cluster_place: Any) -> None:
    cluster_place.write(env="NASTY = '\"; touch pwned; $(touch pwned)'")
    ended = cluster_place.run("run", CACHED)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not list(cluster_place.directory.rglob("*pwned*"))


@pytest.mark.slurm
def test_credentials_reach_no_file(cluster_place: Any) -> None:
    """One in the environment is passed on and written nowhere; one in a TOML would be dumped by CloudAI: refused."""
    secret = {"HF_TOKEN": "hf_NeverToBeSeen", "WANDB_API_KEY": "NeverToBeSeenEither"}
    ended = cluster_place.run("run", CACHED, env=secret)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    files = [path for path in cluster_place.directory.rglob("*") if path.is_file()]
    assert not [path for path in files if b"NeverToBeSeen" in path.read_bytes()]

    for line in ({"args": 'hf_token = "hf_NeverToBeSeen"'}, {"env": 'WANDB_API_KEY = "NeverToBeSeen"'}):
        cluster_place.write(**line)
        ended = cluster_place.run("run", CACHED, "--output-dir", "elsewhere")
        assert ended.returncode == 2
        assert "remove it from the TOML and export it" in ended.stderr
        assert "NeverToBeSeen" not in ended.stdout + ended.stderr
        assert "NeverToBeSeen" not in (cluster_place.directory / "debug.log").read_text()
        assert not list((cluster_place.directory / "elsewhere").rglob("*"))


def test_hooks_are_refused_in_one_line(place: Any) -> None:
    hooks = place.directory / "conf/hook"
    (hooks / "test").mkdir(parents=True)
    place.write()
    test = (place.directory / "tests/tiny.toml").read_text()
    (hooks / "test/tiny.toml").write_text(test.replace('"tiny"', '"first"', 1))
    (hooks / "first.toml").write_text('name = "first"\n[[Tests]]\nid = "first"\ntest_name = "first"\n')
    place.write_scenario(head='pre_test = "first"')
    ended = place.run("dry-run", system="standalone")
    assert ended.returncode == 2
    assert "runs no pre_test or post_test" in ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


def test_what_cannot_run_ends_in_one_line(place: Any) -> None:
    place.write(args="gb = 3\nmb = 2")
    ended = place.run("dry-run", system="standalone")
    assert ended.returncode == 2
    assert "C04 cmd_args.gb" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_nsys_profiles_the_training(place: Any) -> None:
    place.write(head='[nsys]\nenable = true\ntrace = "cuda,nvtx"')
    ended = place.run("dry-run", system="standalone")
    assert ended.returncode == 0, ended.stderr
    (script,) = place.directory.rglob("run.sh")
    assert "nsys profile" in script.read_text()


WINDOWS = {
    "": 3,
    "[training_report]\n": 5,
    "[training_report]\nexclude_start_steps = 2\n": 2,
    "[training_report]\nexclude_start_steps = 2\n[metrics]\nwarmup_steps = 3\n": 3,
    "[training_report]\nexclude_start_steps = 8\n": None,
}


@pytest.mark.parametrize("window", WINDOWS)
def test_the_window_of_statistics(place: Any, window: str) -> None:
    """As `mbridge` reads it from the same file, though CloudAI writes all defaults out."""
    place.write("max_steps = 8")
    test = place.directory / "tests/tiny.toml"
    test.write_text(test.read_text().replace("max_steps = 4\n", "").replace("[metrics]\nwarmup_steps = 1\n", window))
    place.write_scenario("[Tests.cmd_args]\nmb = 1")
    ended = place.run("dry-run", system="standalone")
    if WINDOWS[window] is None:
        assert ended.returncode == 2
        assert "training_report.exclude_start_steps = 8 leaves no step" in ended.stderr
    else:
        assert ended.returncode == 0, ended.stdout + ended.stderr
        (run,) = json.loads((point(place, None) / "plan.json").read_text())["runs"]
        assert run["warmup_steps"] == WINDOWS[window]


def test_an_unknown_recipe_of_a_sweep_ends_in_one_line(place: Any) -> None:
    place.write("mb = [1, 2]")
    place.write_scenario('[Tests.cmd_args]\nmodel_recipe_name = "nothing"')
    ended = place.run("dry-run", system="standalone")
    assert ended.returncode == 2
    assert ended.stderr.startswith("Error: points: ")
    assert "nothing" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_systems_without_a_command_are_refused(place: Any) -> None:
    text = (place.directory / "standalone.toml").read_text().replace('"standalone"', '"lsf"')
    (place.directory / "lsf.toml").write_text(text + 'default_queue = "normal"\nqueues = [{name = "normal"}]\n')
    ended = place.run("dry-run", system="lsf")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "runs on slurm and standalone systems, not on lsf" in ended.stderr


def test_a_scenario_may_change_a_test(place: Any) -> None:
    """CloudAI writes all defaults out and reads them again."""
    place.write_scenario("[Tests.cmd_args]\nmax_steps = 7")
    ended = place.run("dry-run", system="standalone")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    stored = tomllib.loads((point(place, None) / "test-run.toml").read_text())
    assert stored["test_definition"]["cmd_args"]["max_steps"] == 7
    assert stored["test_definition"]["cmd_args"]["model_recipe_name"] == "gpt_tiny"


def test_on_this_machine(place: Any) -> None:
    """A standalone system trains, reports, and says which point failed."""
    place.write("seq_length = [32, 64]")
    ended = place.run("run", system="standalone")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert status_of(ended) == {"PASSED": 2, "FAILED": 0}
    assert json.loads((point(place) / "report.json").read_text())["points"][0]["verdict"] == "success"
    again = place.run("generate-report", "--result-dir", str(place.results), system="standalone")
    assert again.returncode == 0, again.stdout + again.stderr


def test_a_failing_point_on_this_machine(place: Any) -> None:
    place.env["MBRIDGE_PYTHON"] = str(place.directory / "no-python")
    ended = place.run("run", system="standalone")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "MegatronBridgeEmbedded: 1 of 1 points failed" in ended.stderr


def test_a_metric_of_what_did_not_run(place: Any, tmp_path: Path) -> None:
    """CloudAI compares with its METRIC_ERROR by identity."""

    class Run:
        output_path = tmp_path

    for report in Registry().reports_map[Registry().test_definitions_map[TEMPLATE]]:
        assert report(None, Run()).get_metric("default") is METRIC_ERROR
