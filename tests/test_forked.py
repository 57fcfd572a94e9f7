"""Servers of forked processes, as the tests use them."""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.process

WHO = """
import json, os, sys
def parent(pid): return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
foreign = [name for name in sys.modules if name.partition(".")[0] in ("pytest", "_pytest", "tests", "torch")]
print(json.dumps([foreign, parent(os.getppid()), dict(os.environ), sys.argv, os.getcwd()]))
"""


def run(directory: Path, text: str, *arguments: str, timeout: float = 600) -> "subprocess.CompletedProcess[str]":
    """Run a program; it may be one of several at once."""
    name = f"{'-'.join(arguments)}.py"
    (directory / name).write_text(text)
    done = forked.COMMANDS.run([name, *arguments], directory, {**os.environ, "A": "1"}, timeout=timeout)
    assert done is not None
    return done


def test_a_process_has_nothing_of_the_tests(tmp_path: Path) -> None:
    """Its server is one of the session, and has neither pytest nor what the tests import."""
    done = run(tmp_path, WHO, "x", "y z")
    foreign, owner, env, argv, directory = json.loads(done.stdout)
    assert (foreign, owner) == ([], forked.shared_servers().owner), done.stderr
    assert (env, argv, directory) == ({**os.environ, "A": "1"}, ["x-y z.py", "x", "y z"], str(tmp_path))


MEETING = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).touch()
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.01)
print(sys.argv[1])
sys.exit(int(sys.argv[1]))
"""


def test_several_at_once_each_with_its_answer(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        done = [pool.submit(run, tmp_path, MEETING, str(own), str(other)) for own, other in ((3, 4), (4, 5), (5, 3))]
        assert [(each.result().returncode, each.result().stdout) for each in done] == [(n, f"{n}\n") for n in (3, 4, 5)]


HANGING = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
pathlib.Path("new").write_text(f"{os.getpid()} {child.pid}")
os.rename("new", "pids")
time.sleep(1000)
"""


def test_a_time_limit(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run(tmp_path, "import time; time.sleep(1000)", timeout=0.5)


def test_processes_end_with_the_worker_that_asked(tmp_path: Path) -> None:
    """A worker that dies closes its connection; all that it has started by it ends."""
    (tmp_path / "program.py").write_text(HANGING)
    run(tmp_path, "", "empty")  # its server has started
    request = {
        "directory": str(tmp_path),
        "stdout": os.devnull,
        "stderr": os.devnull,
        "program": ["program.py"],
        "env": dict(os.environ),
        "processes": 1,
        "timeout": 600,
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(forked.shared_servers().socket_of("commands")))
        connection.sendall(json.dumps(request).encode() + b"\n")
        while not (tmp_path / "pids").exists():
            time.sleep(0.02)
    pids = (tmp_path / "pids").read_text().split()
    while any(is_running(pid) for pid in pids):
        time.sleep(0.02)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_that_cannot_start(tmp_path: Path) -> None:
    """Its error is that of the test, and no wait."""
    code = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from tests import forked\n"
        "forked._ENVIRONMENT['PYTHONHOME'] = '/nowhere'\n"
        "env = {**os.environ, 'PYTHONHOME': '/nowhere'}\n"
        "forked.ForkServer('ranks').run(['x.py'], '.', env, timeout=9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "ChildProcessError: the server of ranks has ended:\n" in done.stderr
    assert "PYTHONHOME = '/nowhere'" in done.stderr
