"""Workers that are forked after the tests have been collected, once: `pytest --fork N`, for `pytest -n N` of xdist.

Each worker is a copy of the process that has imported all test modules, and with them torch and Megatron-Core. It takes
the next file when it has run one, and sends pytest's reports to that process, which shows and counts them. A worker
that dies fails the test that it was running; another one runs the rest of the file. What a worker starts by
tests/forked.py is forked from servers that all workers share.

Nothing may run in a thread when the workers are forked: a lock that it holds would stay locked in them. Threads of
OpenBLAS are the exception: it ends its own before a fork, and starts them again on demand.
"""

import ctypes
import functools
import gc
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol

from tests.forked import Servers, shared_servers

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_GRACE_S = 60.0  # for a worker's fixtures to end: a cluster may be among them


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "collect once, and run the tests in N processes that are forked then; auto: one for each core"
    parser.addoption("--fork", metavar="N", type=_count, help=text)
    text = "with --fork: run the files of tests on Slurm, which mostly wait, in M more processes"
    parser.addoption("--waiting", metavar="M", type=int, default=0, help=text)


def pytest_configure(config: pytest.Config) -> None:
    if not (count := config.getoption("--fork")):
        return
    if config.getoption("numprocesses", None) or config.getoption("usepdb"):
        raise pytest.UsageError("--fork: neither -n nor --pdb can be used with it")
    config.pluginmanager.register(Forking(config, count, config.getoption("--waiting")))


def _count(text: str) -> int:
    return len(os.sched_getaffinity(0)) if text == "auto" else int(text)


@dataclass
class Worker:
    """A worker, seen from the process that has collected.

    waits: it is one for tests that wait. left: the places in `session.items` of what it has to run yet. last: of what
    it runs or has run last.
    """

    name: str
    waits: bool
    pid: int
    connection: Connection
    left: deque[int]
    last: int | None = None
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.process = os.pidfd_open(self.pid)
        self.node = Node(self.name)


class Node:
    """What pytest reads of a worker of xdist, for the terminal and JUnit's file."""

    def __init__(self, name: str) -> None:
        version = tuple(sys.version_info)
        self.gateway = SimpleNamespace(id=name)
        self.workerinfo = {
            "id": name,
            "sysplatform": sys.platform,
            "version_info": version,
            "executable": sys.executable,
        }


class Forking:
    """The session, seen from the process that has collected."""

    def __init__(self, config: pytest.Config, count: int, waiting: int) -> None:
        self._config, self._counts = config, {False: count, True: waiting}
        self._names = iter(f"gw{number}" for number in range(sys.maxsize))
        self._workers: list[Worker] = []
        self._files: dict[bool, deque[list[int]]] = {False: deque(), True: deque()}  # by whether they wait

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed or not session.items:
            return None  # as without workers
        self._session, self._servers = session, shared_servers()
        for numbers in _files(session.items):
            self._files[self._waits(numbers)].append(numbers)
        # None of many tests is left for the end
        self._files[True] = deque(sorted(self._files[True], key=len, reverse=True))
        if terminal := self._config.pluginmanager.getplugin("terminalreporter"):
            terminal.showfspath = False  # tests of several files take turns
        try:
            self._prepare()
            for waits, count in self._counts.items():
                for _ in range(min(count, len(self._files[waits]))):
                    self._fork(waits)
            while self._workers:
                self._hear()
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            self._stop()
        return True

    def _prepare(self) -> None:
        if threads := [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]:
            raise pytest.UsageError(f"--fork: collecting has started threads: {', '.join(threads)}")
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        gc.collect()
        gc.freeze()  # no collection of a worker visits and copies what it shares with the others

    def _waits(self, numbers: Sequence[int]) -> bool:
        """Whether a file's tests mostly wait, and have workers of their own."""
        return bool(self._counts[True]) and any(self._session.items[n].get_closest_marker("slurm") for n in numbers)

    def _next_file(self, waits: bool) -> list[int] | None:
        """Return what a worker runs next. Those for tests that wait are too many for others."""
        for kind in (waits, True):
            if self._files[kind]:
                return self._files[kind].popleft()
        return None

    def _fork(self, waits: bool) -> None:
        if (numbers := self._next_file(waits)) is None:
            return
        name = next(self._names)
        ours, theirs = Pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with warnings.catch_warnings():
            # Python 3.12 warns of OpenBLAS's idle threads, which OpenBLAS itself stops before a fork and starts again
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            for other in self._workers:
                other.connection.close()
                os.close(other.process)
            ours.close()
            _work(self._session, name, theirs, self._servers)
        theirs.close()
        with suppress(OSError):  # it has done it itself
            os.setpgid(pid, pid)
        worker = Worker(name, waits, pid, ours, deque(numbers))
        self._workers.append(worker)
        ours.send(numbers)

    def _hear(self) -> None:
        """Take what workers have sent, see which have died, and start servers that they ask."""
        asked = {listening: kind for kind, listening in self._servers.not_started.items()}
        by_file = {file: worker for worker in self._workers for file in (worker.connection, worker.process)}
        for file in wait([*by_file, *asked]):
            if file in asked:
                self._servers.start(asked[file])
                continue
            worker = by_file[file]
            if worker in self._workers and (file != worker.connection or not self._take_one(worker)):
                self._see_its_end(worker)

    def _take_one(self, worker: Worker) -> bool:
        """Take a message; False if there is none any more."""
        try:
            name, *values = worker.connection.recv()
        except (EOFError, OSError):
            return False
        getattr(self, f"_take_{name}")(worker, *values)
        return True

    def _take_start(self, worker: Worker, number: int) -> None:
        item = self._session.items[number]
        worker.last = number
        self._config.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)

    def _take_report(self, worker: Worker, data: dict[str, Any]) -> None:
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
        self._log(worker, report)

    def _take_finish(self, worker: Worker, number: int) -> None:
        item = self._session.items[number]
        worker.left.remove(number)
        self._config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _take_next(self, worker: Worker) -> None:
        """Give the worker the next file, or nothing."""
        numbers = self._next_file(worker.waits)
        worker.left.extend(numbers or ())
        with suppress(OSError):  # it has died: another one runs them
            worker.connection.send(numbers)

    def _take_warning(self, _: Worker, fields: dict[str, Any], where: dict[str, Any]) -> None:
        kwargs = {"warning_message": warnings.WarningMessage(**fields), **where}
        self._config.hook.pytest_warning_recorded.call_historic(kwargs=kwargs)

    def _take_stop(self, _: Worker, reason: str) -> None:
        self._session.shouldstop = reason

    def _take_exit(self, _: Worker, reason: str, code: int | None) -> None:
        raise pytest.exit.Exception(reason, code)

    def _take_error(self, worker: Worker, text: str) -> None:
        raise RuntimeError(f"in worker {worker.name}:\n{text}")

    def _take_end(self, worker: Worker) -> None:
        worker.has_ended = True

    def _log(self, worker: Worker, report: pytest.TestReport) -> None:
        report.node, report.worker_id = worker.node, worker.name  # type: ignore[attr-defined]
        self._config.hook.pytest_runtest_logreport(report=report)

    def _see_its_end(self, worker: Worker) -> None:
        """Take what a worker that has ended sent before; if it has died, fail its test and give the rest to another."""
        while worker.connection.poll() and self._take_one(worker):
            pass
        self._workers.remove(worker)
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        worker.connection.close()
        os.close(worker.process)
        if worker.has_ended and status == 0:
            return
        self._kill_group(worker)  # what it has started
        number = worker.left[0] if worker.last is None or worker.last in worker.left else worker.last
        self._fail(worker, number, "call" if number in worker.left else "teardown", status)
        if rest := [each for each in worker.left if each != number]:
            self._files[worker.waits].appendleft(rest)
        self._fork(worker.waits)

    def _fail(self, worker: Worker, number: int, when: Any, status: int) -> None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"has exited with code {status}"
        item, where = self._session.items[number], "after" if when == "teardown" else "in"
        text = f"worker {worker.name} (process {worker.pid}) {how} {where} this test: {item.nodeid}"
        self._log(worker, pytest.TestReport(item.nodeid, item.location, {}, "failed", text, when))
        if when == "call":
            self._config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _stop(self) -> None:
        """End the workers that are left, as Ctrl-C does, and what they have started."""
        for worker in self._workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)
        end = time.monotonic() + _GRACE_S
        try:
            while self._workers and time.monotonic() < end:
                for file in wait([worker.process for worker in self._workers], 1.0):
                    self._workers = [worker for worker in self._workers if worker.process != file or self._reap(worker)]
        finally:
            for worker in self._workers:
                self._kill_group(worker)
                self._reap(worker)
            self._workers = []

    def _reap(self, worker: Worker) -> None:
        os.waitpid(worker.pid, 0)
        os.close(worker.process)
        worker.connection.close()
        self._kill_group(worker)

    def _kill_group(self, worker: Worker) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)


def _files(items: Sequence[pytest.Item]) -> Iterator[list[int]]:
    """Yield the places of each file's tests, in order."""
    files: dict[Path, list[int]] = {}
    for number, item in enumerate(items):
        files.setdefault(item.path, []).append(number)
    yield from files.values()


# --- in a worker


class _EndOfFile:
    """In place of the next test: fixtures of the session stay, and all others end."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[pytest.Session]:
        return [self._session]


def _work(session: pytest.Session, name: str, connection: Connection, servers: Servers) -> NoReturn:
    """Be a worker, to the end of the process: nothing that the session would do at its end is done here."""
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for listening in servers.not_started.values():
            listening.close()
        os.environ["PYTEST_XDIST_WORKER"] = name  # libraries look for it
        _own_files(session.config, name)
        InWorker(session, connection).run()
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        with suppress(Exception):
            sys.__stderr__.flush()  # type: ignore[union-attr]
        os._exit(code)


def _own_files(config: pytest.Config, name: str) -> None:
    """Have a directory, and files for what is printed, apart from those of other workers."""
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / name
    factory._basetemp.mkdir(mode=0o700)
    capture = config.pluginmanager.getplugin("capturemanager")
    for stream in (capture._global_capturing.out, capture._global_capturing.err):
        if hasattr(stream, "targetfd"):  # else nothing, or in memory
            with tempfile.TemporaryFile(buffering=0) as file:
                os.dup2(file.fileno(), stream.tmpfile.fileno(), inheritable=False)


class InWorker:
    """The session, seen from a worker."""

    def __init__(self, session: pytest.Session, connection: Connection) -> None:
        self._session, self._config = session, session.config
        self._connection = connection
        self._last: pytest.Item | None = None
        self._is_running = False  # else warnings are those of the process that has collected

    def run(self) -> None:
        self._config.pluginmanager.register(self)
        self._is_running = True
        try:
            self._run_files()
        except (KeyboardInterrupt, EOFError, BrokenPipeError):
            self._last = None  # no one listens
        except pytest.exit.Exception as end:
            self._connection.send(("exit", end.msg, end.returncode))
        except Exception:
            self._connection.send(("error", traceback.format_exc()))
        finally:
            self._end_fixtures()
        with suppress(OSError):
            self._connection.send(("end",))

    def _run_files(self) -> None:
        items = self._session.items
        while (numbers := self._connection.recv()) is not None:
            for number, following in zip(numbers, [*numbers[1:], None], strict=True):
                self._number = number
                after: Any = _EndOfFile(self._session) if following is None else items[following]
                self._config.hook.pytest_runtest_protocol(item=items[number], nextitem=after)
                if reason := self._session.shouldfail or self._session.shouldstop:
                    self._connection.send(("stop", str(reason)))
                if self._connection.poll():  # the process that has collected has ended
                    raise EOFError
            self._connection.send(("next",))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item) -> bool:
        """Run a test without showing it."""
        self._last = item
        self._connection.send(("start", self._number))
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            self._send(report)
        self._connection.send(("finish", self._number))
        return True

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if self._is_running:
            names = ("message", "category", "filename", "lineno")
            fields = {name: getattr(warning_message, name) for name in names}
            where = {"when": when, "nodeid": nodeid, "location": location}
            try:
                pickle.dumps(fields)
            except Exception:  # an exception that takes other arguments than it keeps
                fields = {**fields, "message": f"{fields['category'].__name__}: {fields['message']}"}
                fields["category"] = pytest.PytestWarning
            self._connection.send(("warning", fields, where))

    def _send(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def _end_fixtures(self) -> None:
        """End what is left, the session's fixtures; an error is one of the last test."""
        end: Callable[[], None] = functools.partial(self._session._setupstate.teardown_exact, None)
        if self._last is None:
            return end()
        with self._config.pluginmanager.getplugin("capturemanager").item_capture("teardown", self._last):
            call = pytest.CallInfo.from_call(end, when="teardown")
        if call.excinfo:
            self._send(pytest.TestReport.from_item_and_call(self._last, call))
