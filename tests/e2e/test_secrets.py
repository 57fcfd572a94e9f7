"""While a real run goes on, its token is in no process's argv, and afterwards in no file."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

TOKEN = "hf_" + "NeverToBeSeen" * 3
SCENARIO = f"""
name = "s"
[[Tests]]
id = "t"
name = "t"
description = "d"
test_template_name = "MegatronBridge"
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 2
max_steps = 12
hf_token = "{TOKEN}"
[Tests.extra_env_vars]
SOME_API_KEY = "{TOKEN}"
"""
LOCAL = 'name = "l"\nscheduler = "local"\n'
SLURM = """
name = "c"
scheduler = "slurm"
default_partition = "main"
monitor_interval = 0.5
[[partitions]]
name = "main"
"""


def has_token(process_directory: Path) -> bool:
    try:
        return TOKEN.encode() in (process_directory / "environ").read_bytes()
    except OSError:
        return False


def check(directory: Path, system: str, env: dict[str, str]) -> None:
    (directory / "system.toml").write_text(system)
    (directory / "s.toml").write_text(SCENARIO)
    files = [f"--system-config={directory}/system.toml", f"--test-scenario={directory}/s.toml"]
    argv = [sys.executable, "-m", "cloudai_mbridge", "run", *files, f"--output-dir={directory}/out"]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **env}, text=True
    ) as process:
        looks = reached = 0
        while process.poll() is None:
            running = {entry: argv_of(entry) for entry in Path("/proc").glob("[0-9]*")}
            assert not [words for words in running.values() if TOKEN.encode() in words]
            reached += any(has_token(entry) for entry, words in running.items() if b"cloudai_mbridge.training" in words)
            looks += 1
            time.sleep(0.01)
        output = process.stdout.read() if process.stdout else ""
    assert process.returncode == 0, output
    assert looks > 5
    assert reached, "the token was to reach the job's environment"
    assert TOKEN not in output
    written = [path for path in (directory / "out").rglob("*") if path.is_file()]
    assert len(written) > 8
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]


def argv_of(process_directory: Path) -> bytes:
    try:
        return (process_directory / "cmdline").read_bytes()
    except OSError:
        return b""


def test_local(tmp_path: Path) -> None:
    check(tmp_path, LOCAL, {})


@pytest.mark.slurm
def test_slurm(tmp_path: Path, cluster: Any) -> None:
    check(tmp_path, SLURM, dict(cluster.env))
