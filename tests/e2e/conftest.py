"""Shared by the end-to-end tests: private clusters, and `mbridge run` on them with the stand-in trainer.

The Slurm is real, and so is everything of mbridge; only the training program is a stand-in, told per test what to do
(tests/stand_in/training.py), so that a job costs nothing.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.terminal import Terminal
from tests.forked import COMMANDS, Process
from tests.sandbox import SlurmSandbox
from tests.sandbox.conf import PATIENT

REPOSITORY = Path(__file__).parents[2]
STAND_IN = REPOSITORY / "tests" / "stand_in" / "training.py"

_SYSTEM = """name = "c"
scheduler = "slurm"
default_partition = "{partition}"
monitor_interval = 0.3
gpus_per_node = {gpus_per_node}
python_executable = "{stand_in}"
{system}
[[partitions]]
name = "{partition}"
nodes = [{nodes}]
"""

_TEST = """
[[Tests]]
id = "{id}"
name = "{id}"
description = "stand-in"
test_template_name = "MegatronBridge"
num_nodes = {num_nodes}
{run}
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = {num_gpus}
max_steps = {steps}
{args}
[Tests.extra_env_vars]
STAND_IN = {told}
{env}
"""


def render_test(
    id: str,
    told: Mapping[str, Any] | None = None,
    *,
    steps: int = 5,
    num_nodes: int = 1,
    num_gpus: int | None = None,
    run: str = "",
    args: str = "",
    env: str = "",
) -> str:
    """Return one [[Tests]] table; `told` is for the stand-in, `run`, `args` and `env` are more lines of TOML."""
    return _TEST.format(
        id=id,
        told=json.dumps(json.dumps(told or {})),  # a string of JSON is one of TOML, too
        steps=steps,
        num_nodes=num_nodes,
        num_gpus=num_gpus or num_nodes,
        run=run,
        args=args,
        env=env,
    )


_PATIENCE = 10  # limits guard against hangs: on a busy machine everything takes several times as long


def wait_until(what: str | Callable[[], str], is_true: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Return the first true answer. what: what is waited for, or a function that describes it when time is up."""
    timeout_s *= _PATIENCE
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if answer := is_true():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")


class MbridgeRun:
    """A `mbridge run`, or a command on its directory, under way or over.

    process: the last one that was started. started: all that were.
    """

    def __init__(
        self, directory: Path, env: Mapping[str, str], *arguments: str, terminal: tuple[int, int] | None = None
    ) -> None:
        """terminal: lines and columns of the terminal that it starts in."""
        self.directory, self.env = directory, env
        self.stdout = self.stderr = ""
        self.started: list[Process] = []
        if terminal is None:
            self.start(*arguments)
        else:
            self.started.append(Terminal(["-m", "cloudai_mbridge", *arguments], terminal, REPOSITORY, env))

    @property
    def process(self) -> Process:
        return self.started[-1]

    def start(self, *arguments: str) -> None:
        """Start `mbridge ARGUMENTS`; what it prints is added to what was printed before."""
        program = ["-m", "cloudai_mbridge", *arguments]
        out, err = self.directory / "mbridge.stdout", self.directory / "mbridge.stderr"
        for path in (out, err):
            path.touch()
        process: Process | None = COMMANDS.start(program, REPOSITORY, self.env, out, err)
        if process is None:
            with out.open("a") as stdout, err.open("a") as stderr:
                process = subprocess.Popen(
                    [sys.executable, *program], stdout=stdout, stderr=stderr, env=self.env, cwd=REPOSITORY
                )
        self.started.append(process)

    def resume(self) -> "MbridgeRun":
        """Start `mbridge resume` on its directory; what was printed before is forgotten."""
        root = self.root
        for name in ("mbridge.stdout", "mbridge.stderr"):
            (self.directory / name).unlink(missing_ok=True)
        self.start("resume", str(root))
        return self

    def command(self, name: str, *arguments: str) -> "MbridgeRun":
        """Start another command on its directory; of a group of commands, "GROUP NAME"."""
        directory = Path(tempfile.mkdtemp(dir=self.directory, prefix="command-"))
        (directory / "out").symlink_to(self.directory / "out", target_is_directory=True)
        other = MbridgeRun(directory, self.env, *name.split(), str(self.root), *arguments)
        self.started[:0] = other.started
        return other

    def kill(self) -> None:
        """Kill all that still run."""
        for process in self.started:
            process.kill()
            process.wait()

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    def finish(self, code: int | None = None, timeout_s: float = 120.0) -> "MbridgeRun":
        """Wait for its end, and check the exit code if one is given."""
        timeout_s *= _PATIENCE
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.read_output()
            raise AssertionError(f"still running after {timeout_s:g} s\n{self.stdout}\n{self.stderr}") from None
        self.read_output()
        assert "Traceback" not in self.stdout + self.stderr, self.stdout + self.stderr
        if code is not None:
            assert self.returncode == code, self.stdout + self.stderr
        return self

    def read_output(self) -> str:
        """Return what it has printed so far, stderr last; in a terminal, both together."""
        if isinstance(self.process, Terminal):
            self.stdout = self.process.text()
            return self.stdout
        self.stdout = (self.directory / "mbridge.stdout").read_text()
        self.stderr = (self.directory / "mbridge.stderr").read_text()
        return self.stdout + self.stderr

    @property
    def words(self) -> str:
        """Everything printed, with the table's frames and line breaks taken out: for finding sentences."""
        text = "".join(" " if "\u2500" <= char <= "\u257f" else char for char in self.read_output())
        return " ".join(text.split())

    @property
    def root(self) -> Path:
        """The directory of the run's results, once there is one."""
        found = wait_until(
            "a result directory",
            lambda: next(iter((self.directory / "out").glob("*")), None) or self.process.poll() is not None,
        )
        assert isinstance(found, Path), self.read_output()
        return found

    @property
    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.root / "report.json").read_text()))

    @property
    def report_text(self) -> str:
        return (self.root / "report.txt").read_text()

    def points(self) -> dict[str, dict[str, Any]]:
        """Return the report's points by key."""
        return {point["key"]: point for point in self.report["points"]}

    def point(self, test_id: str) -> dict[str, Any]:
        """Return the one point of a test in the report."""
        (point,) = (point for point in self.report["points"] if point["test_id"] == test_id)
        return point

    def query(self, sql: str, *values: Any) -> list[Any]:
        """Ask the journal, which need not exist yet."""
        path = self.root / "journal.sqlite"
        if not path.exists():
            return []
        with suppress(sqlite3.OperationalError):
            db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=1500)
            try:
                return db.execute(sql, values).fetchall()
            finally:
                db.close()
        return []

    def jobs(self) -> dict[str, str]:
        """Return the job id of every run's last attempt by run key."""
        rows = self.query("SELECT key, job_id FROM attempts WHERE job_id IS NOT NULL ORDER BY number")
        return dict(rows)

    def job(self, test_id: str) -> str:
        """Return the job id of a test with one run, once it has one."""
        found: str = wait_until(
            lambda: f"a job of {test_id}\n{self.read_output()}",
            lambda: next((id_ for key, id_ in self.jobs().items() if key.startswith(f"{test_id}/")), None),
        )
        return found

    def log(self, test_id: str) -> str:
        """Return what the trainings of a test have printed."""
        return "".join(path.read_text() for path in sorted(self.root.glob(f"{test_id}/*/*/stdout.txt")))

    def wait_for_step(self, test_id: str, step: int = 1) -> str:
        """Wait until a test's log has a step, and return the job's id."""
        wait_until(
            lambda: f"step {step} of {test_id}\n{self.read_output()}",
            lambda: f'"step": {step},' in self.log(test_id) or self.process.poll() is not None,
        )
        assert f'"step": {step},' in self.log(test_id), self.read_output()
        return self.job(test_id)

    def wait_for_words(self, words: str, timeout_s: float = 60.0) -> None:
        """Wait until it has printed something."""
        wait_until(words, lambda: words in self.words or self.process.poll() is not None, timeout_s)
        assert words in self.words, self.words

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


StartRun = Callable[..., MbridgeRun]


def _starter() -> Iterator[StartRun]:
    """Start `mbridge run`: start_run(sandbox, [render_test(...), ...], runner="retries = 0", system=..., env=...).

    scenario: lines of TOML at the top of the scenario. args: more of the command line. path: goes in front of PATH.
    terminal: lines and columns of the terminal that it starts in.
    """
    started: list[MbridgeRun] = []

    def start(
        sandbox: SlurmSandbox | None,
        tests: Iterable[str],
        *,
        runner: str = "",
        system: str = "",
        scenario: str = "",
        args: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        path: str = "",
        partition: str = "main",
        gpus_per_node: int = 4,
        whole_system: str | None = None,
        command: str = "run",
        terminal: tuple[int, int] | None = None,
    ) -> MbridgeRun:
        directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="mb-run-"))
        if whole_system is None:
            assert sandbox is not None
            names = ", ".join(f'"{name}"' for name in sandbox.node_names)
            whole_system = _SYSTEM.format(
                stand_in=STAND_IN, system=system, nodes=names, partition=partition, gpus_per_node=gpus_per_node
            )
        (directory / "system.toml").write_text(whole_system)
        if "settle_s" not in runner:
            runner = f"settle_s = 3\n{runner}"
        text = f'name = "scenario"\n{scenario}\n[runner]\n{runner}\n{"".join(tests)}'
        (directory / "scenario.toml").write_text(text)
        whole_env = {**os.environ, **(sandbox.env if sandbox else {}), **(env or {}), "COLUMNS": "200"}
        if path:
            whole_env["PATH"] = f"{path}:{whole_env['PATH']}"
        files = (f"--system-config={directory}/system.toml", f"--test-scenario={directory}/scenario.toml")
        words = (*command.split(), *files, f"--output-dir={directory}/out", *args)
        run = MbridgeRun(directory, whole_env, *words, terminal=terminal)
        started.append(run)
        return run

    yield start
    for run in started:
        run.kill()
        shutil.rmtree(run.directory, ignore_errors=True)


@pytest.fixture
def start_run() -> Iterator[StartRun]:
    """Start `mbridge run`; see `_starter`. What still runs is killed after the test."""
    yield from _starter()


@pytest.fixture(scope="module")
def start_shared_run() -> Iterator[StartRun]:
    """Start `mbridge run` for fixtures whose result several tests of a file look at."""
    yield from _starter()


@pytest.fixture(scope="session")
def stand_in_test() -> Callable[..., str]:
    """Give `render_test` to tests, which cannot import from here."""
    return render_test


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """Give `wait_until` to tests."""
    return wait_until


@pytest.fixture(scope="module")
def new_cluster() -> Iterator[Callable[..., SlurmSandbox]]:
    """Start clusters that live as long as a file's tests: new_cluster(nodes=3, accounting=True, ...).

    They take a node that does not answer for down after five minutes, unless `extra_conf` sets another SlurmdTimeout.
    """
    made: list[SlurmSandbox] = []

    def new(extra_conf: str = "", **options: Any) -> SlurmSandbox:
        directory = tempfile.mkdtemp(dir="/tmp", prefix="mb-")
        conf = f"{PATIENT}\n{extra_conf}"
        sandbox = SlurmSandbox(directory, die_with_parent=True, extra_conf=conf, **options)
        made.append(sandbox)
        return sandbox.start()

    yield new
    for sandbox in made:
        sandbox.stop(purge=True)


@pytest.fixture(scope="session")
def namespace() -> Callable[[str, str], list[str]]:
    """Return what starts a command in namespaces of its own, as namespace("--uts", "hostname NAME") + [...].

    It skips the test where this user may not have them.
    """

    def prefix(kinds: str, setup: str) -> list[str]:
        kinds = kinds if os.getuid() == 0 else f"--user --map-root-user {kinds}"
        if (missing := [name for name in ("unshare", "hostname", "ip") if shutil.which(name) is None]) != []:
            pytest.skip(f"NOT INSTALLED: {', '.join(missing)}")
        probe = subprocess.run(["unshare", *kinds.split(), "bash", "-c", setup], capture_output=True, text=True)
        if probe.returncode:
            pytest.skip(f"NAMESPACES ARE NOT PERMITTED HERE ({kinds}): {probe.stderr.strip()}")
        return ["unshare", *kinds.split(), "bash", "-c", f'{setup} && exec "$@"', "bash"]

    return prefix


@pytest.fixture
def nothing_left() -> Callable[[SlurmSandbox], None]:
    """Check that no job of ours is in a cluster's queue."""

    def check(sandbox: SlurmSandbox) -> None:
        wait_until("an empty queue", lambda: not sandbox.run("squeue", "--noheader").stdout.strip(), 20)

    return check
