"""Tokens through the real launchers: their features are on, and the values are in no file, output or command line."""

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.megatron_bridge.release import repo_path, venv_path

HF, WANDB = "hf_" + "NeverToBeSeen" * 3, "wandb" + "NorToBeSeen" * 3
URL, NEMO_RUN = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", "https://github.com/NVIDIA-NeMo/Run.git"

SYSTEM = """
name = "c"
scheduler = "slurm"
install_path = "{install}"
default_partition = "main"
account = "root"
gpus_per_node = 2  # four make the launcher ask for --segment, which not every Slurm knows
monitor_interval = 0.3
[[partitions]]
name = "main"
"""
# The family whose launcher asserts that there is a token; W&B by name
SCENARIO = """
name = "s"
[[Tests]]
id = "t"
name = "t"
description = "d"
test_template_name = "MegatronBridge"
time_limit = "00:10:00"
git_repos = [{{url = "{url}", commit = "{commit}"}}]
[Tests.cmd_args]
gpu_type = "h100"
model_family_name = "qwen"
model_recipe_name = "qwen3_30b_a3b"
num_gpus = 2
tp = 1
pp = 1
vp = 1
ep = 2
mb = 1
gb = 2
max_steps = 5
max_retries = 0
hf_token = "{hf}"
wandb_key = "{wandb}"
wandb_project_name = "p"
wandb_experiment_name = "x"
dryrun = {dryrun}
[Tests.extra_env_vars]
MY_API_KEY = "{wandb}"
PLAIN = "seen:$HOME"
"""


@pytest.fixture(params=["0.3", "0.6"])
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """Return an install_path with the real launcher of a release in it, and the commit that pins it."""
    clone: Path = request.getfixturevalue(f"launcher_{request.param.replace('.', '_')}")
    install, commit = tmp_path / "install", f"v{request.param}.0"
    install.mkdir()
    repo_path(install, URL, commit).symlink_to(clone)
    python = venv_path(install, NEMO_RUN, "main") / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return install, commit


def _mbridge(
    command: str, directory: Path, installed: tuple[Path, str], env: dict[str, str], *, dryrun: bool
) -> subprocess.CompletedProcess[str]:
    install, commit = installed
    (directory / "files").mkdir()
    (directory / "files/system.toml").write_text(SYSTEM.format(install=install))
    values = {"url": URL, "commit": commit, "hf": HF, "wandb": WANDB, "dryrun": str(dryrun).lower()}
    (directory / "files/s.toml").write_text(SCENARIO.format(**values))
    argv = [sys.executable, "-m", "cloudai_mbridge", command, f"--system-config={directory}/files/system.toml"]
    argv += [f"--test-scenario={directory}/files/s.toml", f"--output-dir={directory}/out"]
    without = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "WANDB_API_KEY")}
    return subprocess.run(argv, env={**without, **env}, capture_output=True, text=True, timeout=1500, check=False)


def _leaks(directory: Path) -> list[str]:
    """Return the files below a directory that hold a token, also as part of their names."""
    secrets = [HF.encode(), WANDB.encode()]
    found = []
    for path in directory.rglob("*"):
        text = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        if any(secret in text or secret in str(path).encode() for secret in secrets):
            found.append(str(path))
    return found


def test_the_launchers_dry_run(tmp_path: Path, installed: tuple[Path, str]) -> None:
    """Online mode and W&B are on, and what it prints and writes holds no token."""
    done = _mbridge("dry-run", tmp_path, installed, {}, dryrun=True)
    assert done.returncode == 0, done.stderr
    (script,) = (tmp_path / "out").rglob("launcher.sh")
    env = {**os.environ, "HF_TOKEN": HF, "WANDB_API_KEY": WANDB, "MY_API_KEY": WANDB, "COLUMNS": "200"}
    subprocess.run(["bash", "launcher.sh"], cwd=script.parent, env=env, check=False, timeout=1500)
    log = (script.parent / "cloudai_megatron_bridge_launcher.log").read_text()
    assert "dryrun requested: exiting" in log, log
    assert "export TRANSFORMERS_OFFLINE=0" in log
    assert "-hf HF_TOKEN" in log
    assert "-wdk WANDB_API_KEY" in log  # the ranks, too, switch W&B on
    assert "export HF_TOKEN" not in log
    assert "export WANDB_API_KEY" not in log
    assert "export WANDB_RUN_ID" in log
    assert "seen:$HOME" in log
    assert not _leaks(tmp_path / "out")


STAND_IN_SRUN = """#!{python}
import hashlib, os, sys, time
words = sys.argv[1:]
if "hostname" in words:
    sys.exit(print("127.0.0.1"))
target = words[words.index("--output") + 1].replace("%j", os.environ["SLURM_JOB_ID"])
with open(target, "w") as log:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_API_KEY"):
        print(name, hashlib.sha256(os.environ.get(name, "").encode()).hexdigest(), file=log)
    print("offline", os.environ["TRANSFORMERS_OFFLINE"], file=log, flush=True)
    for step in range(1, 6):
        time.sleep(0.3)
        print(f"Step Time : 1.2{{step}}s GPU utilization: 456.7MODEL_TFLOP/s/GPU", file=log, flush=True)
"""


@pytest.mark.slurm
def test_a_live_run(tmp_path: Path, installed: tuple[Path, str], accounting_cluster: Any) -> None:
    """The real launcher submits to a real Slurm; srun, which would need containers, is a stand-in in the job."""
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin/srun"
    srun.write_text(STAND_IN_SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    env = {**accounting_cluster.env, "WANDB_MODE": "offline"}
    env["PATH"] = f"{srun.parent}:{env.get('PATH', os.environ['PATH'])}"
    seen_argv = _argv_while(lambda: _mbridge("run", tmp_path, installed, env, dryrun=False))
    done, commands = seen_argv
    (directory,) = (tmp_path / "out").glob("*/t/single/0")
    log = (directory / "cloudai_megatron_bridge_launcher.log").read_text(errors="replace")
    rank_logs = [path.read_text() for path in directory.rglob("log-*_0.out")]
    assert rank_logs, log
    for name, secret in (("HF_TOKEN", HF), ("WANDB_API_KEY", WANDB), ("MY_API_KEY", WANDB)):
        assert f"{name} {hashlib.sha256(secret.encode()).hexdigest()}" in rank_logs[0]
    assert "offline 0" in rank_logs[0]
    points = json.loads((directory.parents[2] / "report.json").read_text())["points"]
    assert [len(point["steps"]) for point in points] == [5], done.stdout + done.stderr
    (batch,) = directory.rglob("x_sbatch.sh")
    assert "export TRANSFORMERS_OFFLINE=0" in batch.read_text()
    assert not [name for name in ("HF_TOKEN", "WANDB_API_KEY") if f"export {name}" in batch.read_text()]
    (ranks,) = directory.rglob("scripts/x.sh")
    assert "-wdk WANDB_API_KEY" in ranks.read_text()
    assert not _leaks(tmp_path / "out")
    assert HF not in done.stdout + done.stderr
    assert WANDB not in done.stdout + done.stderr
    assert any(b"start_launcher.py" in line for line in commands), "the launcher was never seen"
    assert not [line for line in commands if HF.encode() in line or WANDB.encode() in line]


def _argv_while(start: Any) -> tuple["subprocess.CompletedProcess[str]", set[bytes]]:
    """Run something, and return it with the command line of every process that was seen meanwhile."""
    found: set[bytes] = set()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(start)
        while not future.done():
            for process in Path("/proc").iterdir():
                if process.name.isdigit():
                    try:
                        found.add((process / "cmdline").read_bytes())
                    except OSError:
                        continue
        return future.result(), found
