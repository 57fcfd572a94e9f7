"""The starter of the launcher, with a stand-in for NeMo-Run that says what it was handed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cloudai_mbridge.megatron_bridge import start_launcher

pytestmark = pytest.mark.process

NEMO_RUN = """
class SlurmExecutor:
    def __init__(self, env_vars):
        self.env_vars = env_vars
def run(script, executor=None, dryrun=False):
    return executor.env_vars
"""
NO_NEMO_RUN = "raise ModuleNotFoundError(\"No module named 'nemo_run'\")"
LAUNCHER = """
import json, os, sys
import nemo_run as run
import beside
executor = run.SlurmExecutor({"TRANSFORMERS_OFFLINE": "0", "HF_TOKEN": sys.argv[2]})
seen = []
for attempt in range(2):
    executor.env_vars["WANDB_API_KEY"] = sys.argv[4]
    seen.append(dict(run.run("script", executor=executor)))
print(json.dumps({"argv": sys.argv, "name": __name__, "seen": seen, "key": os.environ["WANDB_API_KEY"]}))
"""


def _start(directory: Path, *, with_nemo_run: bool = True) -> subprocess.CompletedProcess[str]:
    scripts = directory / "scripts"
    scripts.mkdir()
    (scripts / "launcher.py").write_text(LAUNCHER)
    (scripts / "beside.py").touch()
    (directory / "packages").mkdir()
    (directory / "packages/nemo_run.py").write_text(NEMO_RUN if with_nemo_run else NO_NEMO_RUN)
    argv = [sys.executable, start_launcher.__file__, str(scripts / "launcher.py")]
    env = {"PYTHONPATH": str(directory / "packages"), "WANDB_API_KEY": "s3cret"}
    return subprocess.run(
        [*argv, "-hf", "HF_TOKEN", "-wdk", "WANDB_API_KEY"], env=env, capture_output=True, text=True, check=False
    )


def test_nemo_run_gets_no_credential_in_any_attempt(tmp_path: Path) -> None:
    said = json.loads(_start(tmp_path).stdout)
    assert said["seen"] == [{"TRANSFORMERS_OFFLINE": "0"}] * 2
    assert said["argv"] == [f"{tmp_path}/scripts/launcher.py", "-hf", "HF_TOKEN", "-wdk", "WANDB_API_KEY"]
    assert (said["name"], said["key"]) == ("__main__", "s3cret")


def test_a_missing_nemo_run_is_the_launchers_to_say(tmp_path: Path) -> None:
    done = _start(tmp_path, with_nemo_run=False)
    assert done.returncode == 1
    assert "launcher.py" in done.stderr
    assert "No module named 'nemo_run'" in done.stderr
