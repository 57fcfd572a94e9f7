"""A rank without progress leaves the stacks of its threads; one that makes progress leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.recipes.container import container_data
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.hang import hang_timeout_s, hang_watch, seconds_before, step_done
from tests.cases import every
from tests.golden import Sentence
from tests.training.conftest import processes_in

CONFIG: dict[str, Any] = {
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 2,
        "vocab_size": 128,
        "seq_length": 16,
        "dtype": "fp32",
    },
    "train": {"train_iters": 5, "micro_batch_size": 1, "global_batch_size": 2},
    "optimizer": {"lr": 0.001},
}
TRAINING = ["-m", "cloudai_mbridge.training", "--config", "training.json"]
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *TRAINING]
# Runs in every Python process of the test, before the product, and touches rank 1 only
PLANT = """
import ctypes, importlib.abc, importlib.util, os, sys, time

HANG_IN_IMPORT, SLEEP = {hang_in_import}, {sleep}
MODULE = "torch" if HANG_IN_IMPORT else "cloudai_mbridge.training.gpt_step"
calls = 0

def planted_sleep():
    while True:
        SLEEP(1000)

def plant_in(module):
    forward_step = module.forward_step

    def planted_forward_step(state, *args):
        global calls
        calls += 1
        if calls == 3:  # one micro-batch per step and rank
            planted_sleep()
        return forward_step(state, *args)

    module.forward_step = planted_forward_step

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            if HANG_IN_IMPORT:
                planted_sleep()
            load(module)
            plant_in(module)

        spec.loader.exec_module = exec_module
        return spec

if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Finder())
"""
# Notes every time that the timer is set, and sets it
COUNTING_PLANT = """
import faulthandler, os

set_timer = faulthandler.dump_traceback_later

def noted(*args, **kwargs):
    with open(f"set-{os.environ['RANK']}.txt", "a") as file:
        file.write("set\\n")
    set_timer(*args, **kwargs)

faulthandler.dump_traceback_later = noted
"""
SLEEP = "time.sleep"
SLEEP_WITH_THE_GIL = "ctypes.PyDLL(None).sleep"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, repository: Path) -> Iterator[Start]:
    """Start Python in `tmp_path`; at the end of the test kill what runs there, ranks too."""
    (tmp_path / "training.json").write_text(json.dumps(container_data(CONFIG)))
    (tmp_path / "plant").mkdir()

    def run(argv: list[str], timeout: str, plant: str = "", **more: str) -> "subprocess.Popen[str]":
        (tmp_path / "plant" / "sitecustomize.py").write_text(plant)
        path = os.pathsep.join([str(tmp_path / "plant"), str(repository)])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MBRIDGE_HANG_TIMEOUT_S": timeout}
        env |= more
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen([sys.executable, *argv], cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, env=env)
        )
        return started[-1]

    started: list[subprocess.Popen[str]] = []
    yield run
    for process in started:
        process.kill()
    end = time.monotonic() + 10
    while (left := processes_in(tmp_path)) and time.monotonic() < end:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for process in started:
        process.communicate()
    assert not left, "processes were left running"


def wait_for_stacks(directory: Path, process: "subprocess.Popen[str]", *expected: tuple[str, ...]) -> None:
    """Wait until the last dump of every rank N has all of `expected[N]`.

    The last one: a slow start leaves a dump of its own.
    """
    files = [directory / "stacks" / f"rank-{rank}.txt" for rank in range(len(expected))]
    texts: list[str] = []
    end = time.monotonic() + 200
    while time.monotonic() < end and process.poll() is None:
        texts = [file.read_text().rpartition("Timeout (")[2] if file.exists() else "" for file in files]
        if all(part in text for parts, text in zip(expected, texts, strict=True) for part in parts):
            return
        time.sleep(0.1)
    raise AssertionError(f"torchrun: {process.poll()}\n" + "\n\n".join(texts))


@pytest.mark.process
@pytest.mark.parametrize("sleep", [pytest.param(SLEEP, marks=pytest.mark.drill), SLEEP_WITH_THE_GIL])
def test_a_rank_that_never_joins_and_the_one_that_waits_for_it(tmp_path: Path, start: Start, sleep: str) -> None:
    pytest.importorskip("torch")
    process = start(TWO_RANKS, "15", PLANT.format(hang_in_import=False, sleep=sleep))
    waiting = ("0:00:15)!", "distributed_c10d.py", " in train\n")  # in a collective
    missing = ("0:00:15)!", " in planted_sleep\n", " in train_step\n")
    wait_for_stacks(tmp_path, process, waiting, missing)
    assert process.poll() is None, "the run goes on after a dump"


@pytest.mark.process
def test_a_rank_that_hangs_before_its_first_step(tmp_path: Path, start: Start) -> None:
    pytest.importorskip("torch")
    process = start(TWO_RANKS, "10", PLANT.format(hang_in_import=True, sleep=SLEEP))
    wait_for_stacks(tmp_path, process, ("0:00:10)!",), ("0:00:10)!", " in planted_sleep\n", " in main\n"))


@pytest.mark.process
@pytest.mark.parametrize("age_s", [594, 5000])  # of the job: the container was imported first
def test_a_rank_that_begins_late_has_only_the_rest_of_the_time(tmp_path: Path, start: Start, age_s: int) -> None:
    pytest.importorskip("torch")
    since = {"MBRIDGE_HANG_SINCE": f"{time.time() - age_s:.0f}"}
    process = start(TWO_RANKS, "600", PLANT.format(hang_in_import=True, sleep=SLEEP), **since)
    wait_for_stacks(tmp_path, process, (), (" in planted_sleep\n", " in main\n"))


@every(
    ("since", "seconds"),
    [("100", 900.0), ("999.5", 0.5), ("1000", 0.0), ("2000", 0.0), ("", 0.0), ("x", 0.0), ("nan", 0.0), ("-inf", 0.0)],
)
def test_the_seconds_before_a_rank(since: str, seconds: float) -> None:
    assert seconds_before({"MBRIDGE_HANG_SINCE": since}, 1000.0) == seconds
    assert seconds_before({}, 1000.0) == 0


@pytest.mark.process
def test_a_run_that_ends_leaves_nothing(tmp_path: Path, start: Start) -> None:
    pytest.importorskip("torch")
    process = start(TWO_RANKS, "1000", COUNTING_PLANT)
    out, err = process.communicate(timeout=1500)
    assert process.returncode == 0, err
    assert out.count("MBRIDGE_STEP ") == 5
    for rank in range(2):
        assert (tmp_path / f"set-{rank}.txt").read_text().count("set") == 1 + 5, "at the start and after every step"
    assert not (tmp_path / "stacks").exists()


@pytest.mark.process
def test_a_malformed_timeout_is_one_clear_line(tmp_path: Path, start: Start) -> None:
    process = start(TRAINING, "soon")
    _, err = process.communicate(timeout=1500)
    assert process.returncode == 2
    fact = "MBRIDGE_HANG_TIMEOUT_S: 'soon' is not a positive number of seconds"
    assert err == f"error: {fact}; unset it to keep no stacks\n"
    assert not (tmp_path / "stacks").exists()


@every("text", ["soon", "0", "-1", "nan", "inf", "1e10", "1 h", " "])
def test_timeouts_that_are_refused(sentence: Sentence, text: str) -> None:
    with pytest.raises(ConfigError, match="MBRIDGE_HANG_TIMEOUT_S:") as caught:
        hang_timeout_s({"MBRIDGE_HANG_TIMEOUT_S": text})
    sentence(caught)


def test_timeouts_that_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hang_timeout_s({}) is None
    assert hang_timeout_s({"MBRIDGE_HANG_TIMEOUT_S": ""}) is None
    for text, timeout_s in (("1620", 1620.0), ("0.5", 0.5), ("1e+06", 1e6), ("9e9", 9e9)):
        assert hang_timeout_s({"MBRIDGE_HANG_TIMEOUT_S": text}) == timeout_s
        with hang_watch(timeout_s):  # the timer takes it too
            pass


def test_off_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with hang_watch(None):
        step_done()
        assert not list(tmp_path.iterdir())


def test_every_step_starts_the_time_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    with hang_watch(2):
        for _ in range(6):
            time.sleep(0.5)
            step_done()
        assert (tmp_path / "stacks" / "rank-0.txt").read_text() == ""
    assert not list(tmp_path.iterdir())


def test_what_was_written_stays_when_the_rank_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "7")
    with hang_watch(0.2):
        for _ in range(2):
            time.sleep(1)
            step_done()
    (file,) = (tmp_path / "stacks").iterdir()
    assert file.name == "rank-7.txt"
    assert file.read_text().count("Timeout (") == 2
    assert file.read_text().count("test_what_was_written_stays_when_the_rank_goes_on") == 2


def test_a_rank_that_fails_leaves_no_empty_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError), hang_watch(60):
        raise RuntimeError
    assert not list((tmp_path / "stacks").iterdir())


def test_a_file_that_cannot_be_written_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stacks").write_text("in the way")
    with hang_watch(0.1):
        step_done()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ")
    assert line.endswith("'stacks'; no stacks will be kept if this rank hangs")
