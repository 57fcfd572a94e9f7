"""The sandbox: rendering without Slurm, everything else with real clusters in short-lived directories."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.cases import every
from tests.sandbox import SandboxError, SlurmSandbox, host, missing_programs, processes
from tests.sandbox.__main__ import main
from tests.sandbox.conf import (
    SandboxSpec,
    Site,
    node_addresses,
    render_cgroup_conf,
    render_files,
    render_gres_conf,
    render_hosts,
    render_slurm_conf,
)
from tests.sandbox.fleet import SandboxState, parse_state, read_state, render_state
from tests.sandbox.layout import MAX_SOCKET_PATH, SandboxLayout, check_directory

ROOT = Path(host.__file__).parents[2]
SITE = Site(SandboxLayout(Path("/tmp/sb")), ports=(11000, 11001, 11002, 11003), user="me", slurm_version=(22, 5))


# ---- helpers


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield a short directory (unix sockets!) and leave neither it nor a daemon behind."""
    path = Path(tempfile.mkdtemp(dir="/tmp", prefix="mb-"))
    yield path
    SlurmSandbox(path).stop()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmSandbox]:
    """Yield a running cluster of two nodes with four GPUs each, for all tests that leave it idle."""
    sandbox = SlurmSandbox(tempfile.mkdtemp(dir="/tmp", prefix="mb-"), nodes=2, gpus=4, die_with_parent=True)
    with sandbox:
        yield sandbox
    sandbox.stop(purge=True)


def settings(text: str) -> dict[str, str]:
    """Return the KEY=VALUE lines of a configuration file."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    assert processes.wait_until(condition, 20 * timeout_s), f"not within {20 * timeout_s} s"


def job_fields(sandbox: SlurmSandbox, job_id: str) -> dict[str, str]:
    shown = sandbox.run("scontrol", "show", "job", "--oneliner", job_id).stdout
    return dict(field.split("=", 1) for field in shown.split() if "=" in field)


def wait_for_state(sandbox: SlurmSandbox, job_id: str, state: str, timeout_s: float = 15) -> dict[str, str]:
    wait_for(lambda: job_fields(sandbox, job_id)["JobState"] == state, timeout_s)
    return job_fields(sandbox, job_id)


def submit(sandbox: SlurmSandbox, script: str, *options: str) -> str:
    return sandbox.run("sbatch", "--parsable", *options, stdin=f"#!/bin/sh\n{script}\n").stdout.strip()


def leftovers(directory: Path) -> list[str]:
    """List the processes that mention the directory in their command, environment or working directory."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        proc = Path("/proc", entry)
        try:
            command = (proc / "cmdline").read_bytes()
            text = command + (proc / "environ").read_bytes() + os.fsencode(os.readlink(proc / "cwd"))
        except OSError:
            continue
        if int(entry) != os.getpid() and os.fsencode(directory) in text:
            found.append(f"{entry} {command!r}")
    return found


def cli(*argv: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does."""
    command = [sys.executable, "-m", "tests.sandbox", *argv]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **(env or {})}, text=True, capture_output=True, timeout=600, check=False
    )


# ---- rendering


def test_slurm_conf_describes_the_cluster() -> None:
    conf = render_slurm_conf(SandboxSpec(nodes=2, gpus=4, cpus=8, mem_mb=8000), SITE)
    found = settings(conf)
    assert found["SlurmctldPort"] == "11000"
    assert found["SlurmUser"] == found["SlurmdUser"] == "me"
    assert found["AuthInfo"].startswith("socket=/tmp/sb/munge/munge.sock,")
    assert found["DefMemPerCPU"] == "1000"
    assert found["AccountingStorageType"] == "accounting_storage/none"
    assert "NodeName=DEFAULT CPUs=8 RealMemory=8000 Gres=gpu:gb200:4 State=UNKNOWN" in conf
    assert "NodeName=gb200-1 NodeHostname=gb200-1 NodeAddr=127.0.1.1 Port=11002" in conf
    assert "NodeName=gb200-2 NodeHostname=gb200-2 NodeAddr=127.0.1.2 Port=11003" in conf


def test_every_path_in_slurm_conf_lies_in_the_sandbox() -> None:
    found = settings(render_slurm_conf(SandboxSpec(), SITE))
    paths = {key: value for key, value in found.items() if key.endswith(("Location", "Dir", "File"))}
    assert len(paths) == 6
    assert all(value.startswith("/tmp/sb/") for value in paths.values())


def test_extra_conf_comes_last() -> None:
    conf = render_slurm_conf(SandboxSpec(extra_conf="MinJobAge=7\n"), SITE)
    assert conf.endswith("\n\nMinJobAge=7\n")
    assert settings(conf)["MinJobAge"] == "7"


def test_accounting_adds_slurmdbd() -> None:
    files = render_files(SandboxSpec(accounting=True), SITE)
    assert settings(files["slurm.conf"])["AccountingStoragePort"] == "11001"
    assert settings(files["slurmdbd.conf"])["DbdPort"] == "11001"
    assert "slurmdbd.conf" not in render_files(SandboxSpec(), SITE)


def test_gres_conf_names_the_devices() -> None:
    assert render_gres_conf(SandboxSpec(gpus=4), SITE.layout) == "Name=gpu Type=gb200 File=/tmp/sb/dev/nvidia[0-3]\n"
    assert render_gres_conf(SandboxSpec(gpus=0), SITE.layout) == ""
    assert "Gres=" not in render_slurm_conf(SandboxSpec(gpus=0), SITE)


@every(
    ("version", "plugin"),
    [((22, 5), "cgroup/v1"), ((24, 4), "cgroup/v1"), ((24, 5), "disabled"), ((25, 5), "disabled")],
)
def test_cgroup_conf_loads_an_inert_plugin(version: tuple[int, int], plugin: str) -> None:
    assert render_cgroup_conf(SandboxSpec(), version) == f"CgroupPlugin={plugin}\n"


def test_hosts_has_the_nodes_before_the_machines_own_lines() -> None:
    expected = "127.0.0.1 localhost\n127.0.1.1 gb200-1\n127.0.1.2 gb200-2\n10.0.0.9 registry\n"
    assert render_hosts(SandboxSpec(nodes=2), "10.0.0.9 registry\n\n") == expected


def test_node_addresses() -> None:
    assert len(set(node_addresses(SandboxSpec(nodes=600)))) == 600
    assert node_addresses(SandboxSpec(nodes=2, hostnames=False)) == ["127.0.0.1", "127.0.0.1"]
    assert node_addresses(SandboxSpec(nodes=2, hostnames=False, name_prefix="127.0.7.")) == ["127.0.7.1", "127.0.7.2"]


@every(
    ("options", "said"),
    [
        ({"nodes": 0}, "nodes: 0"),
        ({"gpus": -1}, "gpus: -1"),
        ({"cpus": 0}, "cpus: 0"),
        ({"name_prefix": "two words"}, "name_prefix: 'two words'"),
        ({"gpu_type": ""}, "gpu_type: ''"),
    ],
)
def test_spec_refuses_what_slurm_would(options: Mapping[str, object], said: str) -> None:
    with pytest.raises(SandboxError, match=said):
        SandboxSpec(**options)  # type: ignore[arg-type]


def test_state_survives_its_file() -> None:
    state = SandboxState(SandboxSpec(nodes=3, hostnames=False)).with_process("munged", processes.Process(12, 345))
    assert parse_state(render_state(state)) == state


# ---- refusals: one clear line, no Slurm needed


def test_last_legal_and_first_illegal_directory_length() -> None:
    longest_socket = "/spool/gb200-2/gb200-2_1234567.4294967291"
    legal = Path("/" + "d" * (MAX_SOCKET_PATH - len(longest_socket) - 1))
    check_directory(legal, "gb200-2")
    with pytest.raises(SandboxError, match=rf"too long.*at most {len(str(legal))} .*shorter directory"):
        check_directory(Path(f"{legal}d"), "gb200-2")


@every("name", ["with space", "a,b", "a#b", "a%n", "a[1]", "ü"])
def test_directory_that_slurm_conf_cannot_hold(name: str) -> None:
    with pytest.raises(SandboxError, match="not safe"):
        check_directory(Path("/tmp", name), "gb200-1")


def assert_refused(capsys: pytest.CaptureFixture[str], argv: list[str], *said: str) -> None:
    """Assert that the command line refuses in one line that says all of this."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(text in err for text in said), err


def test_cli_refuses_a_too_long_directory(capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    deep = directory / ("d" * 90)
    assert_refused(capsys, ["start", str(deep)], "too long for unix sockets", "use a shorter directory")
    assert not deep.exists()


def test_cli_names_missing_programs(
    capsys: pytest.CaptureFixture[str], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: None if name in {"munged", "slurmd"} else name)
    assert missing_programs() == ["munged", "slurmd"]
    remedy = "apt-get install --no-install-recommends munge slurmd\n"
    assert_refused(capsys, ["start", str(directory)], "not installed: munged, slurmd;", remedy)


@pytest.mark.parametrize("command", ["env", "status", "stop", "kill-controller"])
def test_cli_refuses_what_is_no_sandbox(capsys: pytest.CaptureFixture[str], directory: Path, command: str) -> None:
    assert_refused(capsys, [command, str(directory)], "not a sandbox directory", "start one with")
    (directory / "sandbox.json").write_text("{}")
    assert_refused(capsys, [command, str(directory)], "not a sandbox's state file")
    (directory / "sandbox.json").unlink()


def test_purge_cannot_remove_a_project(capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    (directory / "thesis.tex").touch()
    if not missing_programs():
        assert_refused(capsys, ["start", str(directory)], "not empty and not a sandbox", "empty directory")
    SlurmSandbox(directory).stop(purge=True)
    assert (directory / "thesis.tex").exists()


@every("name", ["SLURM_JOB_ID", "SLURMD_NODENAME", "SBATCH_PARTITION", "SRUN_DEBUG", "PMI_RANK"])
def test_job_variables_are_recognised(name: str) -> None:
    assert host.is_job_variable(name)
    assert host.without_job_variables({name: "1", "PATH": "/bin"}) == {"PATH": "/bin"}


# ---- a running cluster


@pytest.mark.slurm
def test_nodes_are_idle(cluster: SlurmSandbox) -> None:
    assert cluster.node_states() == {"gb200-1": "idle", "gb200-2": "idle"}
    assert all(cluster.daemons().values())
    assert set(cluster.daemons()) == {"munged", "slurmctld", "node-gb200-1", "node-gb200-2"}


@pytest.mark.slurm
def test_batch_job_completes(cluster: SlurmSandbox) -> None:
    job_id = submit(cluster, "echo done", "--output=ok.out")
    assert wait_for_state(cluster, job_id, "COMPLETED")["ExitCode"] == "0:0"
    assert (cluster.directory / "ok.out").read_text() == "done\n"


@pytest.mark.slurm
def test_batch_job_fails_with_its_exit_code(cluster: SlurmSandbox) -> None:
    job = wait_for_state(cluster, submit(cluster, "exit 3"), "FAILED")
    assert (job["ExitCode"], job["Reason"]) == ("3:0", "NonZeroExitCode")


@pytest.mark.slurm
def test_run_attaches_what_the_command_said(cluster: SlurmSandbox) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        cluster.run("sbatch", "--partition=nowhere", "--wrap", "true")
    assert "invalid partition" in caught.value.__notes__[0]


@pytest.mark.slurm
def test_gpus_become_cuda_visible_devices(cluster: SlurmSandbox) -> None:
    show = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert cluster.run("srun", "-K", "--gres=gpu:2", *show).stdout == "0,1\n"
    assert cluster.run("srun", "-K", "--gres=gpu:gb200:4", *show).stdout == "0,1,2,3\n"


@pytest.mark.slurm
def test_more_gpus_than_a_node_has_are_refused(cluster: SlurmSandbox) -> None:
    assert "not available" in cluster.run("sbatch", "--gres=gpu:5", "--wrap", "true", check=False).stderr


@pytest.mark.slurm
def test_each_node_sees_its_own_hostname(cluster: SlurmSandbox) -> None:
    out = cluster.run("srun", "-K", "-N2", "sh", "-c", "echo $SLURMD_NODENAME $(hostname)").stdout
    assert sorted(out.splitlines()) == ["gb200-1 gb200-1", "gb200-2 gb200-2"]


@pytest.mark.slurm
def test_node_names_resolve_in_jobs(cluster: SlurmSandbox) -> None:
    script = "scontrol show hostnames | xargs getent ahostsv4 | awk '/STREAM/ {print $1, $3}'"
    out = cluster.run("srun", "-K", "-N2", "-n2", "sh", "-c", script).stdout
    assert sorted(set(out.splitlines())) == ["127.0.1.1 gb200-1", "127.0.1.2 gb200-2"]


@pytest.mark.slurm
def test_start_refuses_a_running_sandbox(cluster: SlurmSandbox, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, ["start", str(cluster.directory)], "already running", "stop it with")
    assert all(cluster.daemons().values())  # the running one is not touched


@pytest.mark.slurm
def test_unknown_node_is_named(cluster: SlurmSandbox, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, ["crash", str(cluster.directory), "gb200-9"], "gb200-9: no such node", "gb200-1 gb200-2")


# ---- breaking things


@pytest.mark.slurm
def test_a_controller_that_drops_a_request_is_asked_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, ask = iter(["dropped", "dropped"]), SlurmSandbox.node_states

    def node_states(sandbox: SlurmSandbox) -> dict[str, str]:
        if next(answers, None):
            raise SandboxError("no node states: Zero Bytes were transmitted or received")
        return ask(sandbox)

    monkeypatch.setattr(SlurmSandbox, "node_states", node_states)
    with SlurmSandbox(directory, nodes=1) as sandbox:
        assert sandbox.node_states() == {"gb200-1": "idle"}


@pytest.mark.slurm
def test_crash_fails_the_job_and_the_node_comes_back(directory: Path) -> None:
    quick = "SlurmdTimeout=2"  # NODE_FAIL after about 12 s with the sandbox's own 6 s
    with SlurmSandbox(directory, nodes=2, gpus=0, extra_conf=quick, die_with_parent=True) as sandbox:
        first = submit(sandbox, "sleep 300", "--no-requeue", "-w", "gb200-1")
        second = submit(sandbox, "sleep 300", "--no-requeue", "-w", "gb200-2")
        for job_id in (first, second):
            wait_for_state(sandbox, job_id, "RUNNING")
        wait_for(lambda: sum("sleep" in line for line in leftovers(directory)) >= 2, 15)
        sandbox.crash("gb200-2")
        sandbox.crash("gb200-2")  # nothing left to crash
        assert sum("sleep" in line for line in leftovers(directory)) == 1

        assert wait_for_state(sandbox, second, "NODE_FAIL", 30)["Reason"] == "NodeDown"
        assert job_fields(sandbox, first)["JobState"] == "RUNNING"
        assert sandbox.node_states()["gb200-2"] == "down*"

        sandbox.revive("gb200-2")
        sandbox.resume("gb200-2")
        assert sandbox.node_states() == {"gb200-1": "mixed", "gb200-2": "idle"}


@pytest.mark.slurm
def test_quick_reboot_is_noticed(directory: Path) -> None:
    with SlurmSandbox(directory, nodes=1, gpus=0, die_with_parent=True) as sandbox:
        job_id = submit(sandbox, "sleep 300", "--no-requeue")
        wait_for_state(sandbox, job_id, "RUNNING")
        sandbox.crash("gb200-1")
        sandbox.revive("gb200-1")
        wait_for_state(sandbox, job_id, "NODE_FAIL")
        assert sandbox.node_states()["gb200-1"] == "down"
        sandbox.resume("gb200-1")
        sandbox.run("srun", "-K", "true")


@pytest.mark.slurm
def test_a_job_outlives_slurmd_and_slurmctld(directory: Path) -> None:
    with SlurmSandbox(directory, nodes=1, gpus=0, hostnames=False, die_with_parent=True) as sandbox:
        job_id = submit(sandbox, f"touch begun; while [ ! -e {directory}/go ]; do sleep 0.1; done; touch ended")
        wait_for((directory / "begun").exists, 15)
        sandbox.kill_slurmd("gb200-1")
        sandbox.revive("gb200-1")
        sandbox.kill_controller()
        assert sandbox.daemons()["slurmctld"] is False
        with pytest.raises(SandboxError, match=r"slurmctld is not running; try: .* start-controller"):
            sandbox.kill_controller()
        sandbox.start_controller()
        assert job_fields(sandbox, job_id)["JobState"] == "RUNNING"
        (directory / "go").touch()
        wait_for_state(sandbox, job_id, "COMPLETED")
        assert (directory / "ended").exists()


# ---- stopping


@pytest.mark.slurm
def test_stop_leaves_nothing_and_may_be_repeated(directory: Path) -> None:
    sandbox = SlurmSandbox(directory, nodes=2, gpus=0).start()
    job_id = submit(sandbox, "trap '' TERM; setsid sleep 300 & sleep 300", "-N2")
    wait_for_state(sandbox, job_id, "RUNNING")
    assert leftovers(directory)
    sandbox.stop()
    assert leftovers(directory) == []
    assert not sandbox.is_running
    sandbox.stop()
    sandbox.start()  # a stopped sandbox starts again, its jobs still known
    assert job_fields(sandbox, job_id)["JobState"] == "CANCELLED"
    sandbox.stop(purge=True)
    assert not directory.exists()
    sandbox.stop(purge=True)
    assert leftovers(directory) == []


@pytest.mark.slurm
def test_stop_finds_what_nobody_wrote_down(directory: Path) -> None:
    """A supervisor is killed, and the state file forgets munged: both as after a crash at the wrong moment."""
    sandbox = SlurmSandbox(directory, nodes=1, gpus=0).start()
    wait_for_state(sandbox, submit(sandbox, "sleep 300"), "RUNNING")
    running = read_state(sandbox.layout.state_file).processes
    os.kill(running["node-gb200-1"].pid, signal.SIGKILL)
    forgetful = SandboxState(sandbox.spec).with_process("slurmctld", running["slurmctld"])
    sandbox.layout.state_file.write_text(render_state(forgetful))
    assert leftovers(directory)
    SlurmSandbox.load(directory).stop()
    assert leftovers(directory) == []


STARTER = """\
import os, signal, sys
from tests.sandbox import SlurmSandbox
sandbox = SlurmSandbox(sys.argv[1], nodes=1, gpus=0, die_with_parent=sys.argv[2] == "True").start()
sandbox.run("sbatch", "--wrap", "sleep 300")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slurm
@pytest.mark.parametrize("die_with_parent", [True, False])
def test_starter_is_killed(directory: Path, die_with_parent: bool) -> None:
    argv = [sys.executable, "-c", STARTER, str(directory), str(die_with_parent)]
    assert subprocess.run(argv, cwd=ROOT, timeout=600, check=False).returncode == -signal.SIGKILL
    if die_with_parent:
        wait_for(lambda: not leftovers(directory), 10)
    else:
        sandbox = SlurmSandbox.load(directory)
        assert sandbox.node_states().keys() == {"gb200-1"}
        sandbox.stop()
    assert leftovers(directory) == []


@pytest.mark.slurm
def test_failed_start_cleans_up_and_says_why(directory: Path) -> None:
    with pytest.raises(SandboxError, match=r"slurmctld died(?s:.*)Parsing error"):
        SlurmSandbox(directory, nodes=1, extra_conf="NoSuchKey=1").start()
    assert leftovers(directory) == []


# ---- surroundings


@pytest.mark.slurm
def test_another_jobs_environment_is_not_inherited(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = {"SLURM_JOB_ID": "77", "SLURM_CONF": "/no/such", "SBATCH_PARTITION": "no-such", "SRUN_JOBID": "77"}
    for name, value in (outer | {"SLURM_OUTER": "1", "SLURM_NNODES": "9", "SLURMD_NODENAME": "far"}).items():
        monkeypatch.setenv(name, value)
    with SlurmSandbox(directory, nodes=1, gpus=0) as sandbox:
        for process in read_state(sandbox.layout.state_file).processes.values():
            environ = Path(f"/proc/{process.pid}/environ").read_text()
            assert "SLURM_OUTER" not in environ
            assert "SBATCH_PARTITION" not in environ
        job_id = submit(sandbox, "env", "--output=env.out")
        wait_for_state(sandbox, job_id, "COMPLETED")
        seen = settings((directory / "env.out").read_text())
    assert (seen["SLURM_JOB_ID"], seen["SLURMD_NODENAME"], seen["SLURM_NNODES"]) == (job_id, "gb200-1", "1")
    assert not {"SLURM_OUTER", "SBATCH_PARTITION"} & seen.keys()


@pytest.mark.slurm
def test_cli_round_trip(directory: Path) -> None:
    path = str(directory)
    started = cli("start", path, "--nodes", "1", "--gpus", "1", "--cpus", "2", "--no-hostnames", "--name-prefix", "n")
    assert started.returncode == 0, started.stderr
    assert "1 node is idle" in started.stdout

    env = cli("env", path, env={"SBATCH_PARTITION": "no-such"})
    assert "unset SBATCH_PARTITION\n" in env.stdout
    assert f"export SLURM_CONF={path}/slurm.conf\n" in env.stdout
    use = ["sh", "-c", 'eval "$1"; sinfo -h -N -o "%N %c %G"; sbatch --parsable --wrap true', "sh", env.stdout]
    shell_env = {**os.environ, "SBATCH_PARTITION": "no-such"}
    used = subprocess.run(use, cwd=path, env=shell_env, text=True, capture_output=True, timeout=600, check=True)
    assert used.stdout == "n1 2 gpu:gb200:1\n1\n"

    status = cli("status", path)
    assert status.returncode == 0
    assert f"{path}: running" in status.stdout
    assert [line.split() for line in status.stdout.splitlines()[1:4]] == [
        ["munged", "alive"],
        ["slurmctld", "alive"],
        ["node-n1", "alive"],
    ]

    for command in (("kill-slurmd", path, "n1"), ("revive", path, "n1"), ("crash", path, "n1"), ("stop", path)):
        done = cli(*command)
        assert done.returncode == 0, done.stderr
    assert leftovers(directory) == []
    assert cli("status", path).returncode == 1
    assert cli("stop", path, "--purge").returncode == 0
    assert not directory.exists()


@pytest.mark.slurm
@pytest.mark.skipif(bool(missing_programs(accounting=True)), reason="slurmdbd or mariadb is not installed")
def test_accounting_answers_sacct(directory: Path) -> None:
    with SlurmSandbox(directory, nodes=1, gpus=2, accounting=True) as sandbox:
        job_id = submit(sandbox, "exit 4", "--gres=gpu:1")
        wait_for_state(sandbox, job_id, "FAILED")
        sacct = ("sacct", "--allocations", "--noheader", "--parsable2", "--jobs", job_id, "--format=State,ExitCode")
        wait_for(lambda: sandbox.run(*sacct).stdout == "FAILED|4:0\n", 15)
    assert leftovers(directory) == []
