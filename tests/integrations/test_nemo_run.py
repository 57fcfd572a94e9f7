"""Real runs through NeMo-Run's executors, on this machine and on the sandbox cluster."""

import base64
import contextlib
import json
import os
import re
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.golden import Sentence

pytestmark = pytest.mark.process

NASTY = "\"; touch pwned; $(touch pwned) `touch pwned` ' /nemo_run $$ ${app_id}"
WRITTEN = NASTY.replace("${", r"\${")  # names of variables would be expanded
TOKEN = "hf_" + "NeverToBeSeen" * 3
LOCAL = 'name = "l"\nscheduler = "local"\nexecutor = "nemo_run"\n'
SLURM = f"""
name = "c"
scheduler = "slurm"
executor = "nemo_run"
default_partition = "main"
gpus_per_node = 4
monitor_interval = 0.5
account = {json.dumps(NASTY.replace("/nemo_run", ""))}
extra_srun_args = {json.dumps("--comment=" + json.dumps(NASTY))}
[[partitions]]
name = "main"
"""

needs_nemo_run = pytest.mark.skipif(
    find_spec("nemo_run") is None, reason="NEMO-RUN IS NOT INSTALLED (pip install -e '.[nemo-run]' -c constraints.txt)"
)
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that first writes down the environment that reached it."""
    path = tmp_path / "python that 'records"
    path.write_text(f'#!/bin/bash\nenv -0 > "environment.$$"\nexec {sys.executable} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def case(directory: Path, system: str, *, gpus: int = 2, run: str = "", max_steps: int = 5) -> list[str]:
    """Write system and scenario; return the arguments of `mbridge`. The output directory has a nasty name."""
    (directory / "system.toml").write_text(system)
    (directory / "scenario.toml").write_text(
        f'name = "nr"\n[runner]\nsettle_s = 3\n'
        f'[[Tests]]\nid = "t"\nname = "t"\ndescription = "d"\ntest_template_name = "MegatronBridge"\n'
        f"{run}\n[Tests.cmd_args]\nlauncher = 'embedded'\nmodel_recipe_name = 'gpt_tiny'\ncompute_dtype = 'fp32'\n"
        f"num_gpus = {gpus}\ntp = 2\nmax_steps = {max_steps}\nhf_token = '{TOKEN}'\n"
        f"[Tests.extra_env_vars]\nMBRIDGE_NASTY = {json.dumps(WRITTEN)}\nMASTER_ADDR = 'nowhere'\n"
    )
    files = [f"--system-config={directory}/system.toml", f"--test-scenario={directory}/scenario.toml"]
    return [*files, f"--output-dir={directory}/out $(touch pwned)"]


def with_python(system: str, python: Path) -> str:
    return f"python_executable = {json.dumps(str(python))}\n{system}"


def point_of(directory: Path) -> tuple[dict[str, Any], Path]:
    """Return the only point of the only report, and its directory."""
    (report,) = directory.glob("out*/*/report.json")
    (point,) = json.loads(report.read_text())["points"]
    return point, report.parent / point["key"]


def environments(run: Path) -> list[dict[str, str]]:
    texts = [path.read_text() for path in run.glob("environment.*")]
    return [dict(line.split("=", 1) for line in text.split("\0") if line) for text in texts]


def contents(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes, and what NeMo-Run's serializer hides in them: base64 of zlib."""
    raw = path.read_bytes()
    yield raw
    for text in re.findall(rb"[A-Za-z0-9+/_=-]{32,}", raw):
        with contextlib.suppress(ValueError, zlib.error):
            yield zlib.decompress(base64.urlsafe_b64decode(text))


def assert_trained_unharmed(point: dict[str, Any], run: Path, directory: Path) -> None:
    assert point["verdict"] == "success", point
    assert [step["step"] for step in point["steps"]] == [1, 2, 3, 4, 5]
    assert (run / "exit_code.txt").read_text() == "0\n"
    assert not list(directory.rglob("*pwned"))
    seen = environments(run)
    assert seen
    for environment in seen:
        assert environment["MBRIDGE_NASTY"] == NASTY
        assert environment["HF_TOKEN"] == TOKEN
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("environment.")]
    hidden = [text for path in files for text in contents(path)]
    assert len(hidden) > len(files)  # something was decoded
    written = [path for path in files if any(TOKEN.encode() in text for text in contents(path))]
    assert written == [directory / "scenario.toml"]


@needs_nemo_run
@needs_torch
@pytest.mark.drill
def test_two_ranks_train_through_the_local_executor(tmp_path: Path, mbridge: Any, python: Path) -> None:
    (tmp_path / "home").mkdir()
    argv = case(tmp_path, with_python(LOCAL, python))
    done = mbridge("run", *argv, env={"HOME": str(tmp_path / "home")})
    assert done.returncode == 0, done.stdout + done.stderr
    point, run = point_of(tmp_path)
    assert_trained_unharmed(point, run, tmp_path)
    assert point["world_size"] == 2
    assert sorted(environment["RANK"] for environment in environments(run)) == ["0", "1"]
    assert list(run.glob("nemo_run/experiments/mbridge/*/_CONFIG"))
    assert not list((tmp_path / "home").rglob("*nemo*"))


@needs_nemo_run
@needs_torch
@pytest.mark.slurm
def test_two_nodes_train_through_the_slurm_executor(tmp_path: Path, mbridge: Any, python: Path, cluster: Any) -> None:
    (tmp_path / "home").mkdir()
    argv = case(tmp_path, with_python(SLURM, python), gpus=4, run='num_nodes = 2\ntime_limit = "00:05:00"')
    done = mbridge("run", *argv, env={**cluster.env, "HOME": str(tmp_path / "home")})
    assert done.returncode == 0, done.stdout + done.stderr
    point, run = point_of(tmp_path)
    assert_trained_unharmed(point, run, tmp_path)
    assert point["job"]["nodes"] == "gb200-[1-2]"
    assert not list((tmp_path / "home").rglob("*nemo*"))
    shown = cluster.run("scontrol", "show", "job", point["job"]["job_id"]).stdout
    for expected in ("Requeue=0 Restarts=0", "JobState=COMPLETED", f"WorkDir={run}\n", "TimeLimit=00:05:00"):
        assert expected in shown
    assert "touch pwned" in re.search("Account=(.*) QOS", shown)[1]  # type: ignore[index]
    (script,) = run.glob("nemo_run/experiments/mbridge/*/task_sbatch.sh")
    assert str(tmp_path) not in script.read_text()


@needs_nemo_run
@pytest.mark.slurm
def test_a_failed_job_is_not_requeued_and_has_its_exit_code(tmp_path: Path, mbridge: Any, cluster: Any) -> None:
    done = mbridge("run", *case(tmp_path, with_python(SLURM, Path("/bin/false"))), env=cluster.env)
    assert done.returncode == 1, done.stdout + done.stderr
    point, run = point_of(tmp_path)
    assert (run / "exit_code.txt").read_text() == "1\n"
    assert (point["job"]["state"], point["job"]["exit_code"]) == ("FAILED", 1)
    assert "Restarts=0" in cluster.run("scontrol", "show", "job", point["job"]["job_id"]).stdout


@needs_nemo_run
@pytest.mark.slurm
def test_what_sbatch_refuses_is_told_in_its_words(tmp_path: Path, mbridge: Any, cluster: Any) -> None:
    done = mbridge("run", *case(tmp_path, SLURM, run='nodes = ["nowhere", "; $(touch pwned)"]'), env=cluster.env)
    assert done.returncode == 1, done.stdout + done.stderr
    point, _ = point_of(tmp_path)
    assert "NeMo-Run: sbatch: error: invalid number of nodes" in " ".join(point["reasons"])
    assert not list(tmp_path.rglob("*pwned"))


@needs_nemo_run
@needs_torch
def test_a_time_limit_leaves_no_rank_behind(tmp_path: Path, mbridge: Any) -> None:
    """A sleeping process stands for the training; NeMo-Run's torchrun gives every rank a session of its own."""
    sleeper = tmp_path / "sleeper"
    sleeper.write_text('#!/bin/bash\necho $$ >> "pids"\nexec sleep 1000\n')
    sleeper.chmod(0o755)
    done = mbridge("run", *case(tmp_path, with_python(LOCAL, sleeper), run='time_limit = "00:00:45"'))
    assert done.returncode == 1, done.stdout + done.stderr
    point, run = point_of(tmp_path)
    assert point["job"]["state"] == "TIMEOUT"
    pids = [int(text) for text in (run / "pids").read_text().split()]
    assert len(pids) == 2
    assert not [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_absent_it_is_named_in_one_line(tmp_path: Path, repository: Path) -> None:
    blocked = "import sys; sys.modules['nemo_run'] = None; from cloudai_mbridge.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", blocked, "run", *case(tmp_path, LOCAL)],
        cwd=repository,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.endswith("NeMo-Run is not installed here; pip install 'cloudai-mbridge[nemo-run]'")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("option", ["--comment=/shared/nemo_run/x", "-A x"])
def test_options_that_it_would_harm_are_refused(tmp_path: Path, mbridge: Any, sentence: Sentence, option: str) -> None:
    system = f"extra_sbatch_args = [{json.dumps(option)}]\n{SLURM}"
    done = mbridge("dry-run", *case(tmp_path, system))
    assert done.returncode == 2, done.stdout + done.stderr
    sentence(done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("system", [LOCAL, SLURM])
def test_a_dry_run_writes_what_nemo_run_is_given(tmp_path: Path, mbridge: Any, system: str) -> None:
    done = mbridge("dry-run", *case(tmp_path, system))
    assert done.returncode == 0, done.stdout + done.stderr
    (config,) = tmp_path.glob("out*/*/t/*/0/nemo_run.json")
    written = {path.name for path in config.parent.iterdir()}
    assert written >= {"nemo_run.json", "task.sh", "training.json", "test.toml"}
    assert "job.sbatch" not in written
    for script in config.parent.glob("*.sh"):
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    values = json.loads(config.read_text())
    assert TOKEN not in config.read_text()
    assert not {"env", "env_vars", "retries"} & set(values)
