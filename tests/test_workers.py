"""`pytest --fork N` on small tests, each session in processes of its own."""

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
pytestmark = pytest.mark.process

PLUGIN = """
from tests import workers

pytest_addoption, pytest_configure = workers.pytest_addoption, workers.pytest_configure
"""

DYING = """
import os, signal, subprocess, warnings
import pytest

@pytest.fixture(scope="module", autouse=True)
def module():
    yield
    print("the module's end")

def test_before(): pass
def test_killed():
    subprocess.Popen(["sleep", "1000"])
    os.kill(os.getpid(), signal.SIGKILL)
def test_after(tmp_path): assert (tmp_path.parent.name, os.environ["PYTEST_XDIST_WORKER"]) == ("gw2", "gw2")
def test_exits(): os._exit(0)
def test_last(): warnings.warn("this")
"""

LIVING = """
import os
import pytest

@pytest.fixture(scope="session", autouse=True)
def session():
    yield os.getpid()
    print("the session's end")
    raise ValueError("at the end")

def test_shows(capfd):
    os.system("echo captured")
    assert capfd.readouterr().out == "captured\\n"
def test_fails(session):
    assert session == os.getpid()
    os.system("echo printed")
    raise AssertionError("on purpose")
@pytest.mark.skip(reason="why")
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): raise ValueError
@pytest.mark.timeout(0.5)
def test_hangs():
    while True:
        pass
"""


def session(directory: Path, *arguments: str, **files: str) -> "subprocess.Popen[str]":
    """Start pytest on files of tests with two workers."""
    (directory / "conftest.py").write_text(PLUGIN)
    (directory / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text)
    common = ("-c", "pytest.ini", "--fork", "2", "-p", "no:cacheprovider", "--basetemp", "temp", *arguments)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *common],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def running(command: str, directory: Path) -> list[int]:
    """Return the processes with this command line in a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            if entry.name.isdigit() and " ".join(words).strip() == command and (entry / "cwd").readlink() == directory:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_what_a_session_reports(tmp_path: Path) -> None:
    """All outcomes, output and warnings; a worker that dies fails one test, and the rest of its file is run."""
    process = session(tmp_path, "--junitxml", "junit.xml", dying=DYING, living=LIVING)
    text, _ = process.communicate()
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    cases = list(ET.parse(tmp_path / "junit.xml").iter("testcase"))
    found = {f"{case.get('name')}": [child.tag for child in case] for case in cases if case.find("error") is None}
    failed, skipped = ["failure"], ["skipped"]
    assert found == {
        "test_before": [],
        "test_killed": failed,
        "test_after": [],
        "test_exits": failed,
        "test_last": [],
        "test_shows": [],
        "test_fails": failed,
        "test_skipped": skipped,
        "test_expected": skipped,
        "test_hangs": failed,
    }
    assert "4 failed, 4 passed, 1 skipped, 1 xfailed, 1 warning, 1 error in" in text, text
    for part in (
        "was killed by SIGKILL in this test: test_dying.py::test_killed",
        "has exited with code 0 in this test: test_dying.py::test_exits",
        "AssertionError: on purpose",
        "Captured stdout call -----------------------------\nprinted\n",
        "Timeout (>0.5s) from pytest-timeout",
        "ValueError: at the end",
        "Captured stdout teardown ---------------------------\nthe session's end\n",
        "UserWarning: this",
    ):
        assert part in text, (part, text)
    assert not running("sleep 1000", tmp_path), "a dead worker's processes"


WAITING = """
import subprocess
import pytest

@pytest.fixture(scope="session", autouse=True)
def daemon():
    with subprocess.Popen(["sleep", "1001"]) as process:
        yield
        process.kill()
    open("ended", "a").write("x")

def test_waits(): subprocess.run(["sleep", "1002"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_a_session_ends_its_workers(tmp_path: Path, number: signal.Signals) -> None:
    """Each worker ends its fixtures, whether the process that has collected can ask it to or not."""
    process = session(tmp_path, one=WAITING, other=WAITING)
    while len(running("sleep 1002", tmp_path)) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == (pytest.ExitCode.INTERRUPTED if number == signal.SIGINT else -number)
    while running("sleep 1001", tmp_path) or (tmp_path / "ended").read_text() != "xx":
        time.sleep(0.05)
    assert not running("sleep 1002", tmp_path)


MEETING = """
import os, signal, time, pytest
from pathlib import Path

def test_meets():
    Path(f"met-{os.getpid()}").touch()
    while len(list(Path.cwd().glob("met-*"))) < 4:
        time.sleep(0.01)
"""
ON_SLURM = "import os, signal, pytest\npytestmark = pytest.mark.slurm\n"
DYING_ON_SLURM = f"{ON_SLURM}def test_dies(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_rest(): pass\n"


def test_files_that_wait_have_workers_of_their_own(tmp_path: Path) -> None:
    """Four workers, two for each kind of files; a worker of either kind that dies has its file's rest run."""
    files = {"a": MEETING, "b": MEETING, "c": MEETING + ON_SLURM, "d": MEETING + ON_SLURM}
    dying = {"e": DYING_ON_SLURM, "f": DYING_ON_SLURM.replace(ON_SLURM, "import os, signal\n")}
    process = session(tmp_path, "--waiting", "2", **files, **dying)
    text, _ = process.communicate()
    assert "2 failed, 6 passed" in text, text


STOPPING = """
import time, os
def test_fails():
    while not os.path.exists("waits"):
        time.sleep(0.01)
    raise ValueError
"""


def test_the_first_failure_stops_the_others(tmp_path: Path) -> None:
    waiting = WAITING.replace("subprocess.run", "open('waits', 'w'); subprocess.run")
    process = session(tmp_path, "-x", fails=STOPPING, waits=waiting)
    text, _ = process.communicate()
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    assert "stopping after 1 failures" in text
    assert (tmp_path / "ended").read_text() == "x"


@pytest.mark.parametrize(
    ("text", "arguments", "code", "says"),
    [
        pytest.param("import wrong", [], 2, "No module named 'wrong'", id="collection fails"),
        pytest.param("def test_a(): pass", ["-k", "nothing"], 5, "1 deselected", id="no test"),
        pytest.param("def test_a(): pass", ["--collect-only"], 0, "1 test collected", id="only collected"),
        pytest.param("def test_a(): pass", ["-n", "2"], 4, "--fork: neither -n nor --pdb", id="with xdist"),
        pytest.param(
            "import pytest\ndef test_a(): pytest.exit('enough', 7)\ndef test_b(): pass", [], 7, "enough", id="exit"
        ),
        pytest.param(
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='mine').start()\n"
            "def test_a(): pass",
            [],
            4,
            "collecting has started threads: mine",
            id="a thread",
        ),
    ],
)
def test_sessions_that_end_early(tmp_path: Path, text: str, arguments: list[str], code: int, says: str) -> None:
    process = session(tmp_path, *arguments, a=text)
    printed, _ = process.communicate()
    assert process.returncode == code, printed
    assert says in printed
