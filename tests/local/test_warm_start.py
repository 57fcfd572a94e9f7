"""Ranks that start from a process which has imported torch already. All processes are real."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.schedulers.interface import Job, JobClass, JobStatus, Submission
from cloudai_mbridge.schedulers.local import LocalClient
from tests.local.test_local_client import END, START, _is_alive
from tests.runs import planned_run

pytest.importorskip("torch")
pytestmark = pytest.mark.process

WARM, COLD = (LocalSystem(name="l", scheduler="local", warm_start=warm) for warm in (True, False))
SERVER = "from cloudai_mbridge.training.warm_start import serve; serve()"
# What a rank finds, without what differs from one start to the next
LOOK = """import json, os, sys, torch
own = ("MBRIDGE_LOCAL_JOB", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PWD", "OLDPWD")
found = {
    "environment": {name: value for name, value in os.environ.items() if name not in own},
    "names": sorted(os.environ),
    "path": [path for path in sys.path if path != os.getcwd() and "setuptools" not in path],
    "argv": sys.argv[1:], "main": __name__,
    "directory": os.path.basename(os.getcwd()), "path[0]": sys.path[0] == os.getcwd(),
    "stdin": os.read(0, 1).decode(), "session": os.getsid(0) == os.getpid(),
    "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}").split("/")[-1] for fd in ("0", "1", "2")),
    "open": len([fd for fd in os.listdir("/proc/self/fd") if int(fd) > 2]),
    "signals": [line for line in open("/proc/self/status") if line[:6] in ("SigBlk", "SigIgn", "SigCgt")],
    "shown": open("/proc/self/cmdline").read().strip("\\0").split("\\0"),
    "mark": "MBRIDGE_LOCAL_JOB=" + os.environ["MBRIDGE_LOCAL_JOB"] in open("/proc/self/environ").read().split("\\0"),
    "threads": torch.get_num_threads(), "umask": os.umask(0o77), "group": os.getpgid(0) == os.getpid(),
}
with open("found-" + os.environ["RANK"] + ".json", "w") as file:
    json.dump(found, file, indent=1, sort_keys=True)
"""
WAITS = 'import os, time\nopen("rank-" + os.environ["RANK"], "w").write(str(os.getpid()))\n'
WAITS += 'while not os.path.exists("go"): time.sleep(0.02)\n'


class Machine:
    """This machine, with programs for ranks to run."""

    def __init__(self, root: Path, system: LocalSystem) -> None:
        self.root, self.client, self.jobs = root, LocalClient(system), list[Job]()

    def start(self, program: str, ranks: int = 2, before: str = "") -> Job:
        """Start `one_machine -m program`. before: lines of bash."""
        key, token = f"a/{len(self.jobs)}/0", secrets.token_hex(8)
        directory = self.root / key
        directory.mkdir(parents=True)
        (directory / "program.py").write_text(program)
        line = (
            f'"$MBRIDGE_PYTHON" -m cloudai_mbridge.training.one_machine --nproc-per-node {ranks} -m program 1 "a b"\n'
        )
        (directory / "run.sh").write_text(START + before + line + END)
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # with it, every test's jobs have a server of their own
            job_id = self.client.submit(Submission(token, (planned_run(key=key),)), self.root)[key]
        self.jobs.append(Job(key, job_id, token, directory))
        return self.jobs[-1]

    def status(self, job: Job) -> JobStatus:
        return self.client.poll([job])[job.key].status

    def finish(self, job: Job) -> JobStatus:
        wait_for(lambda: self.status(job).is_final)
        return self.status(job)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    every: list[Machine] = []

    def make(system: LocalSystem = WARM) -> Machine:
        every.append(Machine(tmp_path / str(len(every)), system))
        return every[-1]

    yield make
    for each in every:
        each.client.cancel(each.jobs)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Share a server among tests to which it does not matter when it was started."""
    shared = Machine(tmp_path_factory.mktemp("warm"), WARM)
    yield shared
    shared.client.cancel(shared.jobs)


def wait_for(is_there: Callable[[], Any], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.05)


def servers(owner: int) -> list[int]:
    """Return the servers of a process."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if SERVER in words and words[words.index(SERVER) + 1] == str(owner):
            found.append(process.pid)
    return found


def marked(token: str) -> list[int]:
    """Return the processes of a job."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MBRIDGE_LOCAL_JOB") == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_rank_finds_the_same(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    warm, cold, others = machine(), machine(COLD), set(servers(os.getpid()))
    before = "export MBRIDGE_HANG_TIMEOUT_S=9\n"
    assert warm.finish(warm.start(LOOK)).exit_code == 0
    (server,) = set(servers(os.getpid())) - others
    jobs = [each.start(LOOK, before=before) for each in (warm, cold)]
    for each, job in zip((warm, cold), jobs, strict=True):
        assert each.finish(job).exit_code == 0, (job.directory / "stderr.txt").read_text()
    assert set(servers(os.getpid())) - others == {server}
    for rank in range(2):
        found = [(job.directory / f"found-{rank}.json").read_text() for job in jobs]
        assert found[0] == found[1]
    assert '"threads": 1' in found[0]


@pytest.mark.parametrize(("ranks", "before", "threads"), [(2, "export OMP_NUM_THREADS=2\n", 2), (1, "", None)])
def test_variables_that_libraries_read_when_they_are_loaded(
    machine: Any, warm: Machine, monkeypatch: pytest.MonkeyPatch, ranks: int, before: str, threads: int | None
) -> None:
    """The first point has another environment, and so another server."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cold = machine(COLD)
    assert warm.finish(warm.start(LOOK)).exit_code == 0
    first = set(servers(os.getpid()))
    jobs = [each.start(LOOK, ranks, before) for each in (warm, cold)]
    for each, job in zip((warm, cold), jobs, strict=True):
        assert each.finish(job).exit_code == 0, (job.directory / "stderr.txt").read_text()
    found = [(job.directory / "found-0.json").read_text() for job in jobs]
    assert found[0] == found[1]
    assert threads is None or f'"threads": {threads}' in found[0]
    assert len(set(servers(os.getpid())) - first) == 1


def test_a_server_that_cannot_import_is_not_needed(machine: Any) -> None:
    warm, others = machine(), set(servers(os.getpid()))
    broken = "mkdir megatron; echo 'raise ImportError' > megatron/__init__.py\n"
    job = warm.start(LOOK, before=f'{broken}export PYTHONPATH="$PWD:${{PYTHONPATH:-}}"\n')
    assert warm.finish(job).exit_code == 0, (job.directory / "stderr.txt").read_text()
    assert (job.directory / "found-1.json").exists()
    assert set(servers(os.getpid())) <= others


SWEEP = """name = "s"
[[Tests]]
id = "sweep"
name = "sweep"
description = "two layouts"
test_template_name = "MegatronBridge"
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 2
max_steps = 3
gb = 4
tp = [1, 2]
"""


def test_losses_are_the_same_bits(mbridge: Any, tmp_path: Path) -> None:
    (tmp_path / "scenario.toml").write_text(SWEEP)
    found = []
    for warm in ("true", "false"):
        system, out = tmp_path / f"{warm}.toml", tmp_path / warm
        system.write_text(f'name = "l"\nscheduler = "local"\nwarm_start = {warm}\n')
        options = {"system-config": system, "test-scenario": tmp_path / "scenario.toml", "output-dir": out}
        done = mbridge("run", *(word for name, value in options.items() for word in (f"--{name}", value)))
        assert done.returncode == 0, done.stderr
        points = json.loads(next(out.glob("*/report.json")).read_text())["points"]
        found.append([[(step["loss"], step["grad_norm"]) for step in point["steps"]] for point in points])
        assert [len(steps) for steps in found[-1]] == [3, 3]
    assert found[0] == found[1]


DIES = """import os, signal, time
if os.environ["RANK"] == "1":
    {end}
time.sleep(1000)
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGSEGV)", "raise ArithmeticError('of rank 1')"])
def test_a_rank_that_dies_takes_no_other_point_with_it(machine: Any, warm: Machine, end: str) -> None:
    cold = machine(COLD)
    program = DIES.format(end=end)
    jobs = [each.start(program) for each in (warm, cold)]
    other = warm.start(WAITS)
    states = [each.finish(job) for each, job in zip((warm, cold), jobs, strict=True)]
    assert [(state.state, state.exit_code) for state in states] == [("FAILED", 1)] * 2
    errors = [comparable((job.directory / "stderr.txt").read_text()) for job in jobs]
    assert errors[0] == errors[1]
    assert any("rank      : 1" in line for line in errors[0])
    assert not marked(jobs[0].token)
    (other.directory / "go").touch()
    assert warm.finish(other).exit_code == 0
    assert len(servers(os.getpid())) >= 1


def comparable(text: str) -> list[str]:
    """Return the lines without frames, numbers of processes and what is as wide as them, and times."""
    lines = [line for line in text.splitlines() if not line.startswith("  ") or " : " in line]
    plain = [re.sub(r"^[WE]\d.*?\] |\d\d:\d\d:\d\d|\d{4}-\d\d-\d\d_|\d{3,}|[=*-]{5,}", "", line) for line in lines]
    return [line for line in plain if "closing signal" not in line]


def test_cancel_ends_everything_but_the_server(warm: Machine) -> None:
    job = warm.start(WAITS)
    wait_for((job.directory / "rank-1").exists)
    assert len(marked(job.token)) == 8, "bash, one_machine, torchrun, two ranks and what waits for these three"
    warm.client.cancel([job])
    assert warm.status(job).job_class == JobClass.CANCELLED
    assert not marked(job.token)
    assert warm.finish(warm.start(LOOK)).exit_code == 0


def test_off(machine: Any) -> None:
    cold, before = machine(COLD), set(servers(os.getpid()))
    job = cold.start(WAITS)
    wait_for((job.directory / "rank-0").exists)
    parents = psutil.Process(int((job.directory / "rank-0").read_text())).parents()
    assert int(job.job_id.partition(".")[0]) in [parent.pid for parent in parents]
    assert set(servers(os.getpid())) <= before


DRIVER = """import sys, time
from pathlib import Path
from tests.local.test_warm_start import WAITS, WARM, Machine
machine = Machine(Path(sys.argv[1]), WARM)
print(machine.start(WAITS).job_id, flush=True)
time.sleep(1000)
"""


def test_a_killed_driver_leaves_its_job_and_no_server(tmp_path: Path) -> None:
    repository = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", DRIVER, tmp_path], stdout=subprocess.PIPE, cwd=repository) as driver:
        assert driver.stdout is not None
        job_id = driver.stdout.readline().decode().strip()
        job = Job("a/0/0", job_id, job_id.partition(".")[2], tmp_path / "a/0/0")
        wait_for((job.directory / "rank-1").exists)
        (server,) = servers(driver.pid)
        driver.send_signal(signal.SIGKILL)
    wait_for(lambda: not _is_alive(server), seconds=20)
    assert _is_alive(int((job.directory / "rank-1").read_text()))
    later = LocalClient(WARM, [planned_run(key=job.key)])
    assert later.find([Submission(job.token, (planned_run(key=job.key),))], tmp_path) == {job.key: job.job_id}
    assert later.poll([job])[job.key].status.state == "RUNNING"
    (job.directory / "go").touch()
    wait_for(lambda: later.poll([job])[job.key].status.is_final)
    assert later.poll([job])[job.key].status.exit_code == 0
