"""Megatron-Bridge's own launcher from TOML to report. The launcher is a fake; the Slurm job that it submits is not.

Megatron-Bridge cannot be installed where these tests run. What stands for it takes the same command line, submits with
sbatch, names the job as NeMo-Run does, stays until the job has ended, and passes its log on.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from cloudai_mbridge.files.run_files import ROOT_FILES
from cloudai_mbridge.megatron_bridge.release import repo_path, venv_path
from cloudai_mbridge.runner.journal import Journal
from tests.golden import Sentence

TOKEN = "hf_" + "NeverToBeSeen" * 3
URL, COMMIT = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", "v0.3.0"
NEMO_RUN = "https://github.com/NVIDIA-NeMo/Run.git"

# fake.mode: good, exits_1, no_job, fails, nan_loss, forever, too_large; the token's presence is told, never the token
FAKE_LAUNCHER = '''
import json, os, subprocess, sys, time
overrides = dict(word.split("=", 1) for word in sys.argv if word.startswith("fake."))
mode, steps = overrides.get("fake.mode", "good"), sys.argv[sys.argv.index("-ms") + 1]
home = os.environ["NEMORUN_HOME"]
with open(home + "/recorded.json", "w") as file:
    json.dump({"argv": sys.argv[1:], "cwd": os.getcwd(), "has_token": "HF_TOKEN" in os.environ}, file)
if mode == "no_job":
    sys.exit("ValueError: no such recipe")
JOB = """#!/bin/bash
echo "token in the job: ${HF_TOKEN:+yes}"
for step in $(seq 1 %(last)s); do
  sleep 0.3
  echo "Step Time : 1.2${step}s GPU utilization: 456.7MODEL_TFLOP/s/GPU"
  %(more)s
done
exit %(code)s
"""
nan = 'echo " iteration $step/ 5 | lm loss: 1.0E+00 | number of nan iterations: $((step / 5)) |"'
values = {"last": 2 if mode == "fails" else steps, "code": 3 if mode == "fails" else 0}
values["more"] = {"nan_loss": nan, "forever": "sleep 600"}.get(mode, "true")
with open(home + "/job.sh", "w") as file:
    file.write(JOB % values)
log = home + "/log.out"
partition = sys.argv[sys.argv.index("-p") + 1]
size = ["--nodes=2"] if mode == "too_large" else ["--nodes=1", "--ntasks=1"]
job = subprocess.run(
    ["sbatch", "--parsable", "-p", partition, *size, "--output=" + log, home + "/job.sh"],
    check=True, capture_output=True, text=True,
).stdout.strip()
print("- Job id: " + job, flush=True)
def state():
    shown = subprocess.run(["scontrol", "-o", "show", "job", job], capture_output=True, text=True).stdout
    return shown.split("JobState=")[1].split()[0]
while state() in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
    time.sleep(0.2)
print(open(log).read(), flush=True)
sys.exit(1 if mode == "exits_1" else 0)
'''

SYSTEM = """
name = "c"
scheduler = "slurm"
install_path = "{install}"
default_partition = "main"
gpus_per_node = 4
monitor_interval = 0.3
[[partitions]]
name = "main"
"""
TEST = """
[[Tests]]
id = "{id}"
name = "{id}"
description = "d"
test_template_name = "MegatronBridge"
[[Tests.git_repos]]
url = "{url}"
commit = "{commit}"
[Tests.cmd_args]
gpu_type = "h100"
model_family_name = "qwen"
model_recipe_name = "unknown_here"
num_gpus = 4
max_steps = 5
{args}
[Tests.metrics]
warmup_steps = 1
[Tests.extra_env_vars]
SOME_API_KEY = "{token}"
[Tests.extra_cmd_args]
"fake.mode" = "{mode}"
"""


def entry(test_id: str = "t", mode: str = "good", args: str = "") -> str:
    return TEST.format(id=test_id, url=URL, commit=COMMIT, mode=mode, args=args, token=TOKEN)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return an install_path with the fake launcher in place of Megatron-Bridge, and a Python for it."""
    install = tmp_path / "in-stall"
    script = repo_path(install, URL, COMMIT) / "scripts/performance/setup_experiment.py"
    script.parent.mkdir(parents=True)
    script.write_text(FAKE_LAUNCHER)
    python = venv_path(install, NEMO_RUN, "main") / "bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return install


def write(directory: Path, install: Path, *entries: str) -> list[str]:
    (directory / "system.toml").write_text(SYSTEM.format(install=install))
    (directory / "s.toml").write_text('name = "s"\n' + "".join(entries))
    files = [f"--system-config={directory}/system.toml", f"--test-scenario={directory}/s.toml"]
    return [*files, f"--output-dir={directory}/out"]


def report(directory: Path) -> list[dict[str, Any]]:
    (path,) = directory.glob("out/*/report.json")
    points: list[dict[str, Any]] = json.loads(path.read_text())["points"]
    return points


def env_of(cluster: Any, **more: str) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k != "HF_TOKEN"}, **cluster.env, **more}


def run(directory: Path, install: Path, cluster: Any, mode: str) -> tuple[Any, dict[str, Any], Path]:
    argv = [sys.executable, "-m", "cloudai_mbridge", "run", *write(directory, install, entry(mode=mode))]
    env = env_of(cluster, HF_TOKEN=TOKEN)
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=1500, check=False)
    (point,) = report(directory)
    (root,) = (directory / "out").iterdir()
    return done, point, root / point["key"]


@pytest.mark.slurm
def test_a_good_run_and_its_token(tmp_path: Path, installed: Path, cluster: Any) -> None:
    """The token of the TOML is in no process's argv while the run goes on, and in no file afterwards."""
    argv = write(tmp_path, installed, entry(args=f'hf_token = "{TOKEN}"'))
    command = [sys.executable, "-m", "cloudai_mbridge", "run", *argv]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env_of(cluster), stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        looks = 0
        while process.poll() is None:
            assert not [line for line in all_argv() if TOKEN.encode() in line]
            looks += 1
        output = process.stdout.read() if process.stdout else ""
    assert process.returncode == 0, output
    assert looks > 5
    (point,) = report(tmp_path)
    assert (point["verdict"], point["reasons"]) == ("success", [])
    assert [step["step_time_s"] for step in point["steps"]] == [1.21, 1.22, 1.23, 1.24, 1.25]
    assert (point["log"]["source"], point["num_steps"], point["job"]["state"]) == ("lines", 5, "COMPLETED")
    (directory,) = (tmp_path / "out").glob("*/t/single/0")
    job_id = (directory / "slurm_job_id.txt").read_text().strip()
    assert point["job"]["reason"] == f"Slurm job {job_id}"
    assert f"Submitted batch job {job_id}\n" in (directory / "stdout.txt").read_text()
    assert (directory / "exit_code.txt").read_text() == "0\n"
    assert "token in the job: yes" in (directory / "cloudai_megatron_bridge_launcher.log").read_text()
    recorded = json.loads((directory / "nemo_run/recorded.json").read_text())
    assert recorded["has_token"]
    assert recorded["cwd"] == str(repo_path(installed, URL, COMMIT))
    assert recorded["argv"] == [
        *("-p", "main", "-g", "h100", "-hf", "HF_TOKEN", "-ng", "4", "-gn", "4", "-m", "qwen"),
        *("-mr", "unknown_here", "-ms", "5", "--detach", "false"),
        *("--save_config_filepath", "/nemo_run/configs/ConfigContainer.yaml"),
        *("--additional_slurm_params", "gpus-per-node=4;gres=gpu:4", "logger.tensorboard_dir=/nemo_run/tb_logs"),
        *(f"logger.log_{what}_to_tensorboard=true" for what in ("timers", "throughput", "memory")),
        "fake.mode=good",
    ]
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(written) > 8
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in output


def all_argv() -> list[bytes]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                found.append((process / "cmdline").read_bytes())
            except OSError:
                continue
    return found


@pytest.mark.slurm
def test_a_launcher_that_complains_after_a_good_job(tmp_path: Path, installed: Path, cluster: Any) -> None:
    """It does so when the user has no golden values. How the job ended is Slurm's word."""
    done, point, directory = run(tmp_path, installed, cluster, "exits_1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert point["verdict"] == "success"
    assert "its launcher exited with 1" in point["job"]["reason"]
    assert (directory / "exit_code.txt").read_text() == "1\n"


@pytest.mark.slurm
def test_a_launcher_that_submits_nothing(tmp_path: Path, installed: Path, cluster: Any) -> None:
    done, point, directory = run(tmp_path, installed, cluster, "no_job")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert point["verdict"] == "failed"
    log = "cloudai_megatron_bridge_launcher.log"
    assert point["failure"]["id"] == "bad_configuration"
    assert f"the launcher submitted no job; see {log}" in point["reasons"][1]
    assert any("ValueError: no such recipe" in line for line in point["failure"]["evidence"])
    assert f"the launcher submitted no job and exited with 1; see {log}" in [*point["evidence"], *point["last_lines"]]
    assert (directory / "exit_code.txt").read_text() == "1\n"
    assert not (directory / "slurm_job_id.txt").exists()


@pytest.mark.slurm
def test_a_job_that_fails(tmp_path: Path, installed: Path, cluster: Any) -> None:
    """Two records would make CloudAI call it a success."""
    done, point, _ = run(tmp_path, installed, cluster, "fails")
    assert done.returncode == 1
    assert point["verdict"] == "failed"
    assert "the job ended as FAILED (exit code 3" in " ".join(point["reasons"])
    assert "2 of 5 steps are in the log; the first missing is 3" in point["reasons"]


@pytest.mark.slurm
def test_a_loss_that_is_told_must_be_finite(tmp_path: Path, installed: Path, cluster: Any) -> None:
    done, point, _ = run(tmp_path, installed, cluster, "nan_loss")
    assert done.returncode == 1
    assert point["failure"]["id"] == "nan_loss"
    assert point["reasons"][1:] == ["the loss is nan at step 5"]


@pytest.mark.slurm
def test_a_signal_ends_the_launcher_and_its_job(tmp_path: Path, installed: Path, cluster: Any) -> None:
    argv = write(tmp_path, installed, entry(mode="forever"))
    command = [sys.executable, "-m", "cloudai_mbridge", "run", *argv]
    with subprocess.Popen(command, env=env_of(cluster, HF_TOKEN=TOKEN), stdout=subprocess.DEVNULL) as process:
        job_id = wait_for_job(tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    (point,) = report(tmp_path)
    assert point["job"]["state"] == "INTERRUPTED"
    shown = cluster.run("scontrol", "--oneliner", "show", "job", job_id).stdout
    assert "JobState=CANCELLED" in shown
    assert not [line for line in all_argv() if str(installed).encode() in line], "the launcher was left running"


@pytest.mark.slurm
def test_a_job_that_waits_for_nodes_waits_as_long_as_the_scenario_allows(
    tmp_path: Path, installed: Path, cluster: Any
) -> None:
    """Slurm gives this reason for nodes that are down, too; the cluster has as many as the run needs."""
    patience_s = 15  # longer than a job without hope may wait
    argv = write(tmp_path, installed, f"[runner]\npatience_s = {patience_s}\n", entry(mode="too_large"))
    command = [sys.executable, "-m", "cloudai_mbridge", "run", *argv]
    cluster.run("scontrol", "update", "partitionname=main", "MaxNodes=1")
    try:
        subprocess.run(command, env=env_of(cluster, HF_TOKEN=TOKEN), capture_output=True, timeout=600, check=False)
    finally:
        cluster.run("scontrol", "update", "partitionname=main", "MaxNodes=UNLIMITED")
    (point,) = report(tmp_path)
    (root,) = (tmp_path / "out").iterdir()
    with Journal.read_only(root / ROOT_FILES.journal) as journal:
        (attempt,) = journal.entries()[point["key"]].attempts
    assert attempt.status.state == "REFUSED"
    assert re.search(r"Slurm job \d+: PartitionNodeLimit; it requests 1 node$", attempt.status.reason)
    submitted, ended = map(datetime.fromisoformat, (attempt.submitted_at, attempt.ended_at))
    assert (ended - submitted).total_seconds() > patience_s


@pytest.mark.slurm
def test_a_killed_script_takes_its_job_with_it(tmp_path: Path, installed: Path, cluster: Any) -> None:
    argv = write(tmp_path, installed, entry(mode="forever"))
    command = [sys.executable, "-m", "cloudai_mbridge", "run", *argv]
    with subprocess.Popen(command, env=env_of(cluster, HF_TOKEN=TOKEN), stdout=subprocess.DEVNULL) as process:
        job_id = wait_for_job(tmp_path)
        (script,) = [p for p in psutil.process_iter() if is_script_of(p, tmp_path)]
        script.kill()
        assert process.wait(60) == 1
    (point,) = report(tmp_path)
    assert "signal 9, SIGKILL; the launcher's script was killed" in point["reasons"][0]
    assert "JobState=CANCELLED" in cluster.run("scontrol", "--oneliner", "show", "job", job_id).stdout
    assert not [line for line in all_argv() if str(installed).encode() in line], "the launcher was left running"


def is_script_of(process: psutil.Process, directory: Path) -> bool:
    try:
        return process.cmdline() == ["bash", "launcher.sh"] and process.cwd().startswith(str(directory))
    except psutil.Error:
        return False


def wait_for_job(directory: Path) -> str:
    """Wait until the launcher says that it has submitted."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for log in directory.glob("out/*/t/single/0/cloudai_megatron_bridge_launcher.log"):
            if match := re.search(r"Job id: (\d+)\n", log.read_text()):
                return match[1]
        time.sleep(0.1)
    raise AssertionError("no job was submitted")


@pytest.mark.slurm
def test_both_launchers_in_one_scenario(tmp_path: Path, installed: Path, cluster: Any, mbridge: Any) -> None:
    pytest.importorskip("torch")
    embedded = (
        entry("e").replace("[Tests.cmd_args]", '[Tests.cmd_args]\nlauncher = "embedded"\ncompute_dtype = "fp32"')
    ).replace("unknown_here", "gpt_tiny")
    argv = write(tmp_path, installed, entry("u"), embedded.partition("[Tests.extra_cmd_args]")[0])
    done = mbridge("run", *argv, env={**cluster.env, "HF_TOKEN": TOKEN})
    assert done.returncode == 0, done.stdout + done.stderr
    assert {point["key"]: (point["verdict"], point["log"]["source"]) for point in report(tmp_path)} == {
        "u/single/0": ("success", "lines"),
        "e/single/0": ("success", "records"),
    }


def test_no_token_is_bad_input(tmp_path: Path, installed: Path, mbridge: Any, sentence: Sentence) -> None:
    argv = write(tmp_path, installed, entry())
    for command, code in (("dry-run", 0), ("run", 2)):
        done = mbridge(command, *argv[:2], f"--output-dir={tmp_path}/{command}", env={"HF_TOKEN": ""})
        assert done.returncode == code, done.stderr
    sentence(done.stderr)
    assert not (tmp_path / "run").exists()


def test_what_is_not_installed_is_the_environments_failure(tmp_path: Path, mbridge: Any, sentence: Sentence) -> None:
    done = mbridge("run", *write(tmp_path, tmp_path / "none", entry()), env={"HF_TOKEN": TOKEN})
    assert done.returncode == 3
    sentence(done.stderr)
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


# CloudAI's example, fact by fact

CLOUDAI_SYSTEM = """
name = "example-cluster"
scheduler = "slurm"
install_path = "{install}"
output_path = "./results"
default_partition = "partition_1"
mpi = "pmix"
gpus_per_node = 8
ntasks_per_node = 8
[[partitions]]
name = "partition_1"
  [[partitions.groups]]
  name = "group_1"
  nodes = ["node-[001-025]"]
[data_repository]
endpoint = "MY_ENDPOINT"
verify_certs = false
[global_env_vars]
NCCL_IB_TIMEOUT = "20"
MELLANOX_VISIBLE_DEVICES = "0,3,4"
"""
CLOUDAI_TEST = """
name = "megatron_bridge_qwen_30b"
description = "Megatron-Bridge run via CloudAI SlurmSystem for Qwen3 30B A3B"
test_template_name = "MegatronBridge"
extra_container_mounts = []
[[git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = "v0.3.0"
[cmd_args]
gpu_type = "gb200"
container_image = "nvcr.io#nvidia/nemo:26.02.00"
model_family_name = "qwen"
model_recipe_name = "qwen3_30b_a3b"
num_gpus = 8
domain = "llm"
task = "pretrain"
compute_dtype = "fp8_mx"
hf_token = ""
enable_vboost = true
"""
CLOUDAI_SCENARIO = """
name = "megatron_bridge_qwen_30b"
[[Tests]]
id = "megatron_bridge_qwen_30b"
test_name = "megatron_bridge_qwen_30b"
num_nodes = "2"
"""
GOLDEN = """\
#!/bin/bash
# mbridge run megatron_bridge_qwen_30b/single/0
_mbridge_token="${MBRIDGE_LOCAL_JOB:-}"
if [[ "$_mbridge_token" =~ ^[0-9a-f]{16}$ ]]; then
  ln -sT "job=launcher-$$.$_mbridge_token" "claim.$_mbridge_token" 2> /dev/null
  _mbridge_holder=$(readlink "claim.$_mbridge_token")
  if [ "$_mbridge_holder" != "job=launcher-$$.$_mbridge_token" ]; then
    echo "job=launcher-$$.$_mbridge_token token=$_mbridge_token holder=$_mbridge_holder" >> not_counted.txt
    if [ -n "$_mbridge_holder" ]; then exit 79; fi
    echo "mbridge: cannot write $PWD/claim.$_mbridge_token; the job ends without training" >&2
    exit 74
  fi
fi
set -u
export MELLANOX_VISIBLE_DEVICES=0,3,4
export NEMORUN_HOME="$PWD/nemo_run"
mkdir -p "$NEMORUN_HOME"
_mbridge_starter="$PWD/start_launcher.py"
# in the clone, because NeMo-Run packages the repository that it is started in
(
  cd /inst/Megatron-Bridge__v0.3.0 && exec /inst/Run__main-venv/bin/python "$_mbridge_starter" \\
    /inst/Megatron-Bridge__v0.3.0/scripts/performance/setup_experiment.py \\
    -p partition_1 \\
    -g gb200 \\
    -i "nvcr.io#nvidia/nemo:26.02.00" \\
    -c fp8_mx \\
    --task pretrain \\
    -hf HF_TOKEN \\
    --max_retries 1 \\
    -ng 8 \\
    -gn 8 \\
    -cb 'export MELLANOX_VISIBLE_DEVICES=0,3,4' \\
    -cb 'export NCCL_IB_TIMEOUT=20' \\
    --domain llm \\
    -vb true \\
    -m qwen \\
    -mr qwen3_30b_a3b \\
    --moe_a2a_overlap false \\
    -ms 10 \\
    --detach false \\
    --save_config_filepath /nemo_run/configs/ConfigContainer.yaml \\
    --additional_slurm_params 'gpus-per-node=8;gres=gpu:8' \\
    logger.tensorboard_dir=/nemo_run/tb_logs \\
    logger.log_timers_to_tensorboard=true \\
    logger.log_throughput_to_tensorboard=true \\
    logger.log_memory_to_tensorboard=true
) > cloudai_megatron_bridge_launcher.log 2>&1
_mbridge_exit=$?
# the last one: the launcher submits again what failed by bad luck
_mbridge_job=$(grep -aEio '(submitted batch job|job id)[: ]+[0-9]+' cloudai_megatron_bridge_launcher.log \\
  | tail -n 1 | grep -Eo '[0-9]+$')
if [ -n "$_mbridge_job" ]; then
  echo "$_mbridge_job" > slurm_job_id.txt
  echo "Submitted batch job $_mbridge_job"
else
  echo "the launcher submitted no job and exited with $_mbridge_exit; see cloudai_megatron_bridge_launcher.log" >&2
  _mbridge_exit=1
fi
echo "$_mbridge_exit" > exit_code.txt
exit "$_mbridge_exit"
"""


@pytest.fixture
def cloudai_files(tmp_path: Path) -> list[str]:
    for name, text in {"system": CLOUDAI_SYSTEM.format(install="/inst"), "s": CLOUDAI_SCENARIO}.items():
        (tmp_path / f"{name}.toml").write_text(text)
    (tmp_path / "test").mkdir()
    (tmp_path / "test/t.toml").write_text(CLOUDAI_TEST)
    files = {"system-config": "system.toml", "tests-dir": "test", "test-scenario": "s.toml"}
    return [f"--{option}={tmp_path}/{name}" for option, name in files.items()]


def test_cloudais_files_verify(tmp_path: Path, cloudai_files: list[str], mbridge: Any) -> None:
    done = mbridge("verify-configs", tmp_path, *cloudai_files[:2], env={"HF_TOKEN": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok  ") == 3


def test_cloudais_files_render_the_golden_script(tmp_path: Path, cloudai_files: list[str], mbridge: Any) -> None:
    texts = []
    for name in ("one", "other"):
        done = mbridge("dry-run", *cloudai_files, "--output-dir", tmp_path / name, env={"HF_TOKEN": ""})
        assert done.returncode == 0, done.stderr
        (script,) = (tmp_path / name).rglob("launcher.sh")
        texts.append(script.read_text())
    assert texts == [GOLDEN, GOLDEN]
