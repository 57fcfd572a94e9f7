"""One driver per directory; locks end with the processes that hold them."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from cloudai_mbridge.errors import BadInput, InUse, ToolFailure
from cloudai_mbridge.runner import lock
from cloudai_mbridge.runner.lock import driver_lock, has_driver, no_driver, submit_lock
from tests.golden import Sentence

pytestmark = pytest.mark.process

HOLD = """
import sys, time
from pathlib import Path
from cloudai_mbridge.runner.lock import driver_lock
with driver_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def _holder(root: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(root)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_second_driver_is_refused_and_told_by_whom(tmp_path: Path, sentence: Sentence) -> None:
    process = _holder(tmp_path)
    try:
        with pytest.raises(BadInput) as caught, driver_lock(tmp_path):
            pass
        sentence(caught)
        assert (has_driver(tmp_path) or "").startswith(f"process {process.pid} on ")
    finally:
        process.kill()
        process.communicate()


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    process = _holder(tmp_path)
    process.kill()
    process.communicate()
    assert has_driver(tmp_path) is None
    with driver_lock(tmp_path):
        assert (has_driver(tmp_path) or "").startswith(f"process {os.getpid()} on ")


KILLED_WHILE_IT_STARTED_A_COMMAND = """
import os, subprocess, sys
from pathlib import Path
from cloudai_mbridge.runner.lock import driver_lock
with driver_lock(Path(sys.argv[1])):
    (lock,) = [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")
               and os.readlink(f"/proc/self/fd/{fd}").endswith("driver.lock")]
    child = subprocess.Popen(["sleep", "600"], pass_fds=(lock,), stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    os._exit(1)
"""


@pytest.mark.parametrize("take", [driver_lock, no_driver])  # `mbridge resume` looks first, then takes it
def test_a_child_that_the_driver_was_starting_is_waited_for(
    tmp_path: Path, take: Callable[[Path], AbstractContextManager[None]]
) -> None:
    """Between fork and exec, a child has all files of its parent, and so its lock."""
    program = [sys.executable, "-c", KILLED_WHILE_IT_STARTED_A_COMMAND, str(tmp_path)]
    child = int(subprocess.run(program, stdout=subprocess.PIPE, text=True, check=False).stdout)
    assert has_driver(tmp_path)
    threading.Timer(1.0, os.kill, (child, signal.SIGKILL)).start()
    with take(tmp_path):
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_the_lock_ends_with_its_block(tmp_path: Path) -> None:
    for _ in range(2):
        with driver_lock(tmp_path):
            assert has_driver(tmp_path) is not None
        assert has_driver(tmp_path) is None


def test_to_look_takes_no_lock_and_makes_no_file(tmp_path: Path) -> None:
    assert has_driver(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    with driver_lock(tmp_path):
        pass
    assert has_driver(tmp_path) is None
    with driver_lock(tmp_path):  # looking has left nothing locked
        pass


def test_the_next_driver_waits_for_a_submission_under_way(tmp_path: Path) -> None:
    """The driver was killed while its sbatch was talking to the controller."""
    with submit_lock(tmp_path) as descriptor:
        child = subprocess.Popen(["sleep", "60"], pass_fds=(descriptor,))
    freed = []

    def free() -> None:
        freed.append(time.monotonic())
        child.kill()

    threading.Timer(0.3, free).start()
    with submit_lock(tmp_path):
        assert freed
    child.wait()


def test_a_command_that_does_not_inherit_it_holds_nobody_up(tmp_path: Path) -> None:
    with submit_lock(tmp_path):
        child = subprocess.Popen(["sleep", "60"])
    try:
        with submit_lock(tmp_path):
            assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_a_submission_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    monkeypatch.setattr(lock, "_SUBMIT_WAIT_S", 0.1)
    with submit_lock(tmp_path), pytest.raises(ToolFailure) as caught, submit_lock(tmp_path):
        pass
    sentence(caught)


def test_no_driver_keeps_drivers_out_and_writes_nothing(tmp_path: Path, sentence: Sentence) -> None:
    with no_driver(tmp_path):
        assert list(tmp_path.iterdir()) == []
    with driver_lock(tmp_path):
        pass
    before = (tmp_path / "driver.lock").read_bytes()
    with no_driver(tmp_path), no_driver(tmp_path), pytest.raises(InUse), driver_lock(tmp_path):
        pass
    assert has_driver(tmp_path) is None
    assert (tmp_path / "driver.lock").read_bytes() == before
    with driver_lock(tmp_path), pytest.raises(InUse) as caught, no_driver(tmp_path):
        pass
    sentence(caught)


def test_what_a_lock_says_cannot_control_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "driver.lock").write_bytes(b"\x1b[2Jprocess \xff" + b"x" * 10_000)
    with (tmp_path / "driver.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said = has_driver(tmp_path) or ""
    assert said.startswith("\\x1b[2Jprocess ")
    assert len(said) < 300
