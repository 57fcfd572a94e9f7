"""Scripts that are really run by bash, with a recorder in the place of the interpreter."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudai_mbridge.launch.script import render_local_script, render_slurm_script
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem
from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.schedulers.slurm.commands import parse_started
from tests.cases import every
from tests.runs import planned_run

pytestmark = pytest.mark.process

LOCAL = LocalSystem(name="here", scheduler="local")
SLURM = SlurmSystem(name="c", scheduler="slurm", default_partition="main", partitions=[{"name": "main"}])
RECORDER = """\
#!{python} -IS
import json, os, sys
record = {{"argv": sys.argv[1:], "env": {{k.decode(): v.decode() for k, v in os.environb.items()}}}}
with open("record.json", "w") as out:
    json.dump(record, out)
sys.exit(int(os.environ.get("RECORDER_EXIT", "0")))
"""
FAKE_SRUN = """\
#!/bin/bash
printf '%s\\0' "$@" > srun_argv
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=1 exec "$@"
"""
FAKE_SCONTROL = """\
#!/bin/bash
[[ "$*" == "show hostnames node[1-2]" ]] && printf 'node1\\nnode2\\n'
"""
NASTY = [
    *("", " ", "'", '"', "\\", "$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"; touch pwned; "'),
    *("a\nb\n", "\n#SBATCH --wrap=id", r"${HOME:-x} \$HOME $$ $? $1 $(", "* ? [a-z] {a,b} ~ !!", "-n", "a\tb\rc"),
    *("\x01\x1b[31m\x7f", "é 😀 \u2028 \ufeff", "#comment", "<(id) >pwned |id &", "EOF"),
]
# `~` and a leading `~/` are the home directory
TEXT = st.text(alphabet=st.characters(blacklist_categories=("Cs",), blacklist_characters="\0$"), max_size=40).filter(
    lambda text: text.split("/")[0] != "~"
)

RunScript = Callable[..., dict[str, Any]]


def _run_plan(env: dict[str, str], **keys: Any) -> RunPlan:
    return planned_run("sweep", **{"key": "sweep/single/0", "env": env, **keys})


def _script(kind: str, env: dict[str, str], **keys: Any) -> str:
    run = planned_run("sweep", **{"key": "sweep/single/0", "env": env, **keys})
    return render_local_script(run, LOCAL) if kind == "local" else render_slurm_script(run, SLURM)


def _executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def run_script(tmp_path: Path) -> RunScript:
    """Run a script in a directory of its own; return what the interpreter received, the exit code and the files."""
    tools = tmp_path / "tools dir"  # with a space, as real paths have
    tools.mkdir()
    recorder = _executable(tools / "python", RECORDER.format(python=sys.executable))
    _executable(tools / "python3", RECORDER.format(python=sys.executable))  # a container's own
    _executable(tools / "srun", FAKE_SRUN)
    _executable(tools / "scontrol", FAKE_SCONTROL)
    count = iter(range(10**6))

    def run(text: str, **env: str) -> dict[str, Any]:
        directory = tmp_path / f"run {next(count)}"
        directory.mkdir()
        (directory / "script").write_text(text, encoding="utf-8")
        base = {"PATH": f"{tools}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8", "MBRIDGE_PYTHON": str(recorder)}
        done = subprocess.run(
            ["bash", "script"], cwd=directory, env={**base, **env}, capture_output=True, text=True, check=False
        )
        assert done.stderr == ""
        files = {path.name: path.read_bytes().decode() for path in directory.iterdir()}
        assert set(files) <= {"script", "record.json", "started.txt", "exit_code.txt", "srun_argv"}
        return {**json.loads(files.get("record.json", "{}")), "code": done.returncode, "files": files}

    return run


SLURM_ENV = {
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_ID": "30007",
    "SLURM_JOB_NAME": "mbridge-sweep-single-0.cafe",
    "SLURM_CPUS_ON_NODE": "12",
}


def test_the_local_script_starts_torchrun(run_script: RunScript) -> None:
    record = run_script(render_local_script(_run_plan({}), LOCAL))
    assert record["argv"] == [
        *("-m", "cloudai_mbridge.training.one_machine", "--nproc-per-node", "2"),
        *("-m", "cloudai_mbridge.training", "--config", "training.json"),
    ]


def test_the_slurm_script_starts_torchrun_on_every_node(run_script: RunScript) -> None:
    run = _run_plan({"A": "x y"}, num_nodes=2, ranks_per_node=4)
    record = run_script(render_slurm_script(run, SLURM), **SLURM_ENV)
    assert record["argv"] == [
        *("-m", "torch.distributed.run", "--master-addr", "node1", "--master-port", "15007"),
        *("--nnodes", "2", "--nproc-per-node", "4"),
        *("-m", "cloudai_mbridge.training", "--config", "training.json"),
    ]
    assert record["env"]["PET_NODE_RANK"] == "1"
    assert record["env"]["A"] == "x y"
    options = "--cpus-per-task=12 --kill-on-bad-exit=1 --nodes=2 --ntasks=2 --ntasks-per-node=1"
    assert record["files"]["srun_argv"].split("\0")[:5] == options.split()


@every(
    ("listed", "expected"), [("8,4", "4"), ("16(x3),8", "8"), ("128", "128"), ("4(x2),16,8(x10)", "4"), ("9,10", "9")]
)
def test_a_step_takes_the_cpus_that_every_node_has(run_script: RunScript, listed: str, expected: str) -> None:
    """SLURM_CPUS_ON_NODE is of the first node."""
    run = _run_plan({}, num_nodes=2, ranks_per_node=4)
    text = render_slurm_script(run, SLURM.model_copy(update={"extra_srun_args": "--cpus-per-task=3"}))
    argv = run_script(text, **SLURM_ENV, SLURM_JOB_CPUS_PER_NODE=listed)["files"]["srun_argv"].split("\0")
    given = [word for word in argv if word.startswith("--cpus-per-task=")]
    assert given == [f"--cpus-per-task={expected}", "--cpus-per-task=3"]  # the user's, which stands last, wins


@every("kind", ["local", "slurm"])
@every("code", [0, 1, 7, 137])
def test_the_exit_code_is_kept_and_left_behind(run_script: RunScript, kind: str, code: int) -> None:
    record = run_script(_script(kind, {}), RECORDER_EXIT=str(code), **SLURM_ENV)
    assert (record["code"], record["files"]["exit_code.txt"]) == (code, f"{code}\n")


@every(
    ("env", "expected"),
    [
        ({}, {"job": "30007", "restarts": "0"}),
        ({"SLURM_RESTART_COUNT": "2"}, {"job": "30007", "restarts": "2"}),
        ({"SLURM_ARRAY_JOB_ID": "29000", "SLURM_ARRAY_TASK_ID": "7"}, {"job": "29000_7", "restarts": "0"}),
    ],
)
def test_a_job_says_that_it_has_started(run_script: RunScript, env: dict[str, str], expected: dict[str, str]) -> None:
    files = run_script(render_slurm_script(_run_plan({}), SLURM), **SLURM_ENV, **env)["files"]
    name = SLURM_ENV["SLURM_JOB_NAME"]
    assert parse_started(files["started.txt"]) == {**expected, "token": "", "name": name, "nodes": "node[1-2]"}


@every(
    ("name", "token"),
    [
        ("mbridge-a-0.0123456789abcdef", "0123456789abcdef"),
        ("project-sub:mbridge-a-0.0123456789abcdef", "0123456789abcdef"),
        ("mbridge-a-0.0123456789abcdef_cpu-4h", "0123456789abcdef"),
        ("mbridge-a.fedcba9876543210-0.0123456789abcdef.site", "0123456789abcdef"),
        ("mbridge-a-0.00000000000000ff.0123456789abcdef", "00000000000000ff"),
        ("something-else", "00000000000000ff"),  # from the environment, which sbatch keeps
    ],
)
def test_a_job_knows_its_token_whatever_a_site_does_to_its_name(run_script: RunScript, name: str, token: str) -> None:
    env = {**SLURM_ENV, "SLURM_JOB_NAME": name, "MBRIDGE_JOB_TOKEN": "00000000000000ff"}
    text = render_slurm_script(_run_plan({}), SLURM)
    record = run_script(text.replace("_mbridge_exit=$?", "_mbridge_exit=$?; rm claim.*"), **env)
    assert record["env"]["MBRIDGE_JOB_TOKEN"] == token
    assert parse_started(record["files"]["started.txt"])["token"] == token


@every(
    ("started", "code", "runs"),
    [
        ("job=30007 token= name=NAME restarts=0 nodes=node9", 5, False),
        ("job=30007 token= name=NAME restarts=1 nodes=node9", 5, True),
        ("job=30007 token= name=NAME restarts=1 nodes=node9", 0, False),
        ("job=3000 token= name=NAME restarts=0 nodes=node9", 5, True),
        ("job=30007 token= name=NAMES restarts=0 nodes=node9", 5, True),
        ("job=30007 token= name=NAMES restarts=0 nodes=node9", 0, True),
    ],
)
def test_a_job_that_has_ended_does_not_run_again(run_script: RunScript, started: str, code: int, runs: bool) -> None:
    """A controller that was killed may have forgotten its end."""
    left = f"echo '{started.replace('NAME', SLURM_ENV['SLURM_JOB_NAME'])}' > started.txt; echo {code} > exit_code.txt"
    text = render_slurm_script(_run_plan({}), SLURM).replace("#!/bin/bash\n", f"#!/bin/bash\n{left}\n", 1)
    record = run_script(text, **SLURM_ENV)
    assert ("record.json" in record["files"]) is runs
    assert record["code"] == (0 if runs else code)
    assert record["files"]["started.txt"].count("job=") == (2 if runs else 1)


def test_a_local_job_says_that_it_has_started(run_script: RunScript) -> None:
    files = run_script(render_local_script(_run_plan({}), LOCAL), MBRIDGE_LOCAL_JOB="cafe")["files"]
    started = parse_started(files["started.txt"])
    pid, _, token = started["job"].partition(".")
    assert (pid.isdigit(), token) == (True, "cafe")
    assert started["nodes"]


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_a_job_that_starts_again_has_no_exit_code_yet(tmp_path: Path, kind: str) -> None:
    """The scheduler may start it a second time in the same directory: the first exit code must not speak for it."""
    (tmp_path / "exit_code.txt").write_text("0\n")
    (head,) = re.findall(r".*started\.txt\n", _script(kind, {}), re.DOTALL)
    subprocess.run(["bash", "-c", head], cwd=tmp_path, env={**os.environ, **SLURM_ENV}, check=True)
    assert not (tmp_path / "exit_code.txt").exists()
    assert (tmp_path / "started.txt").exists()


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_a_rank_knows_when_to_write_its_stacks(run_script: RunScript, kind: str) -> None:
    """Before the runner cancels the job."""
    text = _script(kind, {}, hang_timeout_s=1800.0)
    assert 0 < float(run_script(text, **SLURM_ENV)["env"]["MBRIDGE_HANG_TIMEOUT_S"]) < 1800


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_nasty_values_arrive_as_data(run_script: RunScript, kind: str) -> None:
    env = {f"NASTY_{i}": value for i, value in enumerate(NASTY)}
    record = run_script(_script(kind, env), **SLURM_ENV)
    assert {name: record["env"][name] for name in env} == {n: text.replace(r"\$", "$") for n, text in env.items()}


@given(st.lists(TEXT, min_size=1, max_size=12))
@settings(max_examples=25, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_arrives_as_data(run_script: RunScript, values: list[str]) -> None:
    env = {f"V{i}": value for i, value in enumerate(values)}
    record = run_script(render_local_script(_run_plan(env), LOCAL))
    assert {name: record["env"][name] for name in env} == env


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_names_of_variables_are_expanded(run_script: RunScript, kind: str) -> None:
    text = _script(kind, {"A": "one 'two'", "B": "/x:${A}:$A", "C": "[$NOT_SET]"})
    record = run_script(text, **SLURM_ENV)
    assert (record["env"]["B"], record["env"]["C"]) == ("/x:one 'two':one 'two'", "[]")


@every("name", ["python", "exit_code", "head_node", "master_port"])
@every("kind", ["local", "slurm"])
def test_a_variable_of_any_name_arrives(run_script: RunScript, kind: str, name: str) -> None:
    """The script's own variables must not take the place of the user's."""
    assert run_script(_script(kind, {name: "mine"}), **SLURM_ENV)["env"][name] == "mine"


@every("value", ["my python", "$(touch pwned)", "a'b", '"', "-c"])
def test_the_interpreter_of_the_system_file_is_data(run_script: RunScript, tmp_path: Path, value: str) -> None:
    tool = _executable(tmp_path / value, RECORDER.format(python=sys.executable))
    system = LOCAL.model_copy(update={"python_executable": str(tool)})
    argv = run_script(render_local_script(_run_plan({}), system))["argv"]
    assert argv[:2] == ["-m", "cloudai_mbridge.training.one_machine"]


@every("value", NASTY)
def test_options_of_srun_are_data(run_script: RunScript, value: str) -> None:
    run = _run_plan({}, container_image=f"i{value}", container_mounts=(f"m{value}",))
    options = run_script(render_slurm_script(run, SLURM), **SLURM_ENV)["files"]["srun_argv"].split("\0")
    assert f"--container-image=i{value}" in options
    (mounts,) = [option for option in options if option.startswith("--container-mounts=")]
    own, _, users = mounts.partition("=")[2].partition(",")
    assert own.partition(":")[0] == own.partition(":")[2] != ""
    assert users == f"m{value}".replace(r"\$", "$")


FAKE_SUDO = '#!/bin/bash\nprintf \'%s\\n\' "$*" >> "$CLOCKS"; exit "${SUDO_EXIT:-0}"\n'


@pytest.mark.parametrize("code", [0, 3])
def test_clocks_that_cannot_be_set_end_the_job(run_script: RunScript, tmp_path: Path, code: int) -> None:
    _executable(tmp_path / "tools dir/sudo", FAKE_SUDO)
    run = _run_plan({}, node_commands=("sudo nvidia-smi -lgc 1500", "sudo nvidia-smi -lmc 9,9"))
    text = render_slurm_script(run, SLURM).replace(">&2", "> /dev/null")  # the fixture wants an empty stderr
    clocks = tmp_path / "clocks.txt"
    record = run_script(text, CLOCKS=str(clocks), SUDO_EXIT=str(code), **SLURM_ENV)
    set_all = ["nvidia-smi -lgc 1500", "nvidia-smi -lmc 9,9"]
    assert clocks.read_text().splitlines() == (set_all[:1] if code else set_all)
    assert ("argv" in record) is not bool(code), "it trains with these clocks or not at all"
    assert (record["code"], record["files"]["exit_code.txt"]) == (code, f"{code}\n")
