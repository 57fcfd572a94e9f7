"""The parts of the runner that decide by themselves: pace, progress, order, limits, attempts' files."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.runner import Pace
from cloudai_mbridge.runner.context import Phase, Tracked, affordable, free_slots, past_end_dependency, ready
from cloudai_mbridge.runner.interrupt import CONFIRM_S, Interrupted, Interrupts, SecondSignal
from cloudai_mbridge.runner.progress import Progress
from cloudai_mbridge.runner.submitter import put_aside
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus

RUNNING = JobStatus("RUNNING", JobClass.ACTIVE)
PENDING = JobStatus("PENDING", JobClass.ACTIVE)

# Pace


def _intervals(pace: Pace, look_s: float = 0.0) -> tuple[float, float]:
    """Return the shortest and the longest of many intervals."""
    drawn = [pace.interval(look_s) for _ in range(300)]
    return min(drawn), max(drawn)


def test_a_pace_slows_down_while_nothing_changes(clock: Any) -> None:
    pace = Pace(1.0, 30.0, clock)
    for idle_s, expected in ((0, 1), (5, 1), (100, 10), (1000, 30), (10**5, 30)):
        clock.now = 1000.0 + idle_s
        low, high = _intervals(pace)
        assert 0.85 * expected <= low <= expected <= high <= 1.15 * expected
    pace.changed()
    assert _intervals(pace)[1] <= 1.15


def test_drivers_do_not_march_in_step(clock: Any) -> None:
    low, high = _intervals(Pace(1.0, 30.0, clock))
    assert high > low


def test_a_busy_controller_is_asked_less_often(clock: Any) -> None:
    pace = Pace(1.0, 30.0, clock)
    assert _intervals(pace, look_s=2.0)[0] >= 0.85 * 10
    assert _intervals(pace, look_s=100.0)[1] <= 1.15 * 30


def test_the_longest_interval_wins(clock: Any) -> None:
    """A user's monitor_interval may be shorter than the shortest."""
    assert _intervals(Pace(1.0, 0.2, clock))[1] <= 0.25


# Progress


def _record(step: int) -> str:
    values = f'"step": {step}, "step_time_s": 0.5, "tflops_per_gpu": 1.0, "losses": {{"lm loss": 5.0}}'
    return f'MBRIDGE_STEP {{"version": 1, {values}}}\n'


@pytest.fixture
def log(tmp_path: Path, bench: Any) -> Path:
    path = tmp_path / bench.run("a").key / "stdout.txt"
    path.parent.mkdir(parents=True)
    return path


def test_progress_counts_from_the_last_step(bench: Any, clock: Any, log: Path) -> None:
    run, progress = bench.run("a"), Progress(bench.root, clock)
    assert progress.idle_s(run) == (0.0, 0)  # there is no log yet
    clock.now += 10
    assert progress.idle_s(run) == (10.0, 0)
    log.write_text(_record(1) + _record(2)[:20])
    assert progress.idle_s(run) == (0.0, 1)
    clock.now += 5
    with log.open("a") as file:
        file.write("words, and no step\n" * 1000)
    assert progress.idle_s(run) == (5.0, 1)
    with log.open("a") as file:
        file.write(_record(3))
    assert progress.idle_s(run) == (0.0, 3)


def test_a_step_that_is_repeated_is_progress(bench: Any, clock: Any, log: Path) -> None:
    """The training has started anew from a checkpoint."""
    run, progress = bench.run("a"), Progress(bench.root, clock)
    log.write_text(_record(1) + _record(2))
    progress.idle_s(run)
    clock.now += 5
    with log.open("a") as file:
        file.write(_record(1))
    assert progress.idle_s(run)[0] == 0.0


def test_a_log_that_begins_anew(bench: Any, clock: Any, log: Path) -> None:
    run, progress = bench.run("a"), Progress(bench.root, clock)
    log.write_text("".join(_record(step) for step in range(1, 9)))
    assert progress.idle_s(run)[1] == 8
    clock.now += 5
    log.write_text(_record(1))
    assert progress.idle_s(run) == (0.0, 1)


def test_the_next_attempt_begins_anew(bench: Any, clock: Any, log: Path) -> None:
    run, progress = bench.run("a"), Progress(bench.root, clock)
    log.write_text(_record(1))
    progress.idle_s(run)
    clock.now += 500
    progress.forget(run)
    progress.forget(run)
    log.unlink()
    assert progress.idle_s(run) == (0.0, 0)


def test_the_upstream_launcher_tells_its_steps_elsewhere(bench: Any, clock: Any, log: Path) -> None:
    (log.parent / "cloudai_megatron_bridge_launcher.log").write_text(
        "Step Time : 0.50s GPU utilization: 100.0MODEL_TFLOP/s/GPU\n" * 3
    )
    run = bench.run("a", upstream=object())
    assert Progress(bench.root, clock).idle_s(run) == (0.0, 3)


# What runs next


def _tracked(bench: Any, *tests: str, **keys: Any) -> list[Tracked]:
    return [Tracked(bench.run(test, i, **keys)) for i, test in enumerate(tests)]


def _ready(runs: list[Tracked], now: float = 0.0) -> list[str]:
    return [run.plan.test_id for run in ready(runs, now)]


def test_what_waits_is_ready_in_order(bench: Any) -> None:
    runs = _tracked(bench, "a", "b", "c", "d")
    runs[1].phase, runs[2].phase = Phase.ACTIVE, Phase.ENDED
    assert _ready(runs) == ["a", "d"]


def test_a_retry_is_ready_when_its_time_has_come(bench: Any) -> None:
    (run,) = _tracked(bench, "a")
    run.not_before = 10.0
    assert _ready([run], now=9.9) == []
    assert _ready([run], now=10.0) == ["a"]


@pytest.mark.parametrize(
    ("phase", "status", "starts", "completes"),
    [
        (Phase.WAITING, None, False, False),
        (Phase.UNSURE, None, False, False),
        (Phase.ACTIVE, None, False, False),
        (Phase.ACTIVE, PENDING, False, False),
        (Phase.ACTIVE, RUNNING, True, False),
        (Phase.WAITING, JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE), False, False),  # to be tried again
        (Phase.ENDED, None, True, True),
    ],
)
def test_who_waits_for_whom(bench: Any, phase: Phase, status: JobStatus | None, starts: bool, completes: bool) -> None:
    first = Tracked(bench.run("a"), phase=phase, status=status, not_before=1e9)
    after_start = Tracked(bench.run("s", after_start=("a",)))
    after_end = Tracked(bench.run("e", after_completion=("a",)))
    end_with = Tracked(bench.run("w", end_with=("a",)), phase=Phase.ACTIVE)
    runs = [first, after_start, after_end, end_with]
    assert _ready(runs) == ["s"] * starts + ["e"] * completes
    assert past_end_dependency(runs) == [end_with] * completes


def test_the_gate_is_open_when_all_checks_have_ended(bench: Any) -> None:
    checks = _tracked(bench, "pre_test", "pre_test", is_pre_test=True)
    runs = [*checks, *_tracked(bench, "a")]
    assert _ready(runs) == ["pre_test", "pre_test"]
    checks[0].phase, checks[1].phase = Phase.ENDED, Phase.ACTIVE
    assert _ready(runs) == []
    checks[1].phase = Phase.ENDED
    assert _ready(runs) == ["a"]


def _active(bench: Any, token: str, count: int, phase: Phase = Phase.ACTIVE) -> list[Tracked]:
    return [Tracked(bench.run(token, i), phase=phase, token=token) for i in range(count)]


def test_free_slots(bench: Any) -> None:
    runs = [*_active(bench, "x", 5), *_active(bench, "y", 1, Phase.UNSURE), *_tracked(bench, "w")]
    assert free_slots(runs, None, {}) is None
    assert free_slots(runs, 8, {}) == 2
    assert free_slots(runs, 8, {"x": 2}) == 5
    assert free_slots(runs, 8, {"x": 9}) == 2
    assert free_slots(runs, 3, {}) == -3


def test_a_budget_takes_what_comes_first(bench: Any) -> None:
    hour = {"time_limit_s": 3600.0}
    runs = [Tracked(bench.run("a", i, ranks_per_node=ranks, **hour)) for i, ranks in enumerate((1, 2, 4, 1))]
    for budget, count in ((0.5, 0), (1.0, 1), (2.9, 1), (3.0, 2), (6.9, 2), (7.0, 3), (8.0, 4)):
        assert affordable(runs, budget, runs) == runs[:count]
    assert affordable(runs, None, runs) == runs


def test_a_budget_knows_what_was_used_and_what_may_be(bench: Any) -> None:
    hour = {"time_limit_s": 3600.0, "num_nodes": 2}
    ended = Tracked(bench.run("a", 0, **hour), phase=Phase.ENDED)
    ended.end_attempt(JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE, run_time_s=1800.0))
    ended.end_attempt(JobStatus("COMPLETED", JobClass.SUCCEEDED, run_time_s=1800.0))
    assert ended.gpu_s == 2 * 3600.0
    active = Tracked(bench.run("a", 1, **hour), phase=Phase.ACTIVE)
    waiting = Tracked(bench.run("a", 2, **hour))
    runs = [ended, active, waiting]
    assert affordable(runs, 5.9, [waiting]) == []
    assert affordable(runs, 6.0, [waiting]) == [waiting]
    active.phase = Phase.UNSURE
    assert affordable(runs, 5.9, [waiting]) == []


def test_an_attempt_of_unknown_length_costs_its_limit(bench: Any) -> None:
    run = Tracked(bench.run("a", ranks_per_node=4, time_limit_s=100.0))
    run.end_attempt(JobStatus("FAILED", JobClass.FAILED))
    assert run.gpu_s == 400.0
    run = Tracked(bench.run("a", ranks_per_node=4, time_limit_s=100.0, whole_nodes_gpus=8))
    assert run.most_gpu_s == 800.0


# The files of an attempt

LEFT = ("stdout.txt", "stderr.txt", "started.txt", "exit_code.txt", "slurm_job_id.txt", "report.txt")
KEPT = ("training.json", "test.toml", "job.sbatch", "run.sh")


def _directory(path: Path) -> Path:
    for name in (*LEFT, *KEPT):
        (path / name).write_text(name)
    for name in ("stacks", "nemo_run"):
        (path / name).mkdir()
        (path / name / "file").write_text(name)
    return path


def _names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


def test_what_an_attempt_left_is_put_aside(tmp_path: Path) -> None:
    put_aside(tmp_path, 1)
    assert _names(tmp_path) == set()
    put_aside(_directory(tmp_path), 1)
    put_aside(tmp_path, 1)
    assert _names(tmp_path) == {*KEPT, "attempt-1"}
    assert _names(tmp_path / "attempt-1") == {*LEFT, "stacks", "nemo_run"}
    assert (tmp_path / "attempt-1" / "stdout.txt").read_text() == "stdout.txt"
    assert (tmp_path / "attempt-1" / "stacks" / "file").read_text() == "stacks"


@pytest.mark.parametrize("count", range(len(LEFT) + 1))
def test_a_crash_in_its_middle_loses_nothing(tmp_path: Path, count: int) -> None:
    _directory(tmp_path)
    if count:
        (tmp_path / "attempt-2").mkdir()
    for name in LEFT[:count]:
        (tmp_path / name).rename(tmp_path / "attempt-2" / name)
    put_aside(tmp_path, 2)
    assert _names(tmp_path) == {*KEPT, "attempt-2"}
    assert {name: (tmp_path / "attempt-2" / name).read_text() for name in LEFT} == {name: name for name in LEFT}


def test_what_is_put_aside_is_never_overwritten_and_the_directory_is_clean(tmp_path: Path) -> None:
    """After an attempt that was withdrawn, its number is put aside a second time."""
    put_aside(_directory(tmp_path), 1)
    (tmp_path / "stdout.txt").write_text("a stray's")
    put_aside(tmp_path, 1)
    assert (tmp_path / "attempt-1" / "stdout.txt").read_text() == "stdout.txt"
    assert (tmp_path / "attempt-1" / "stdout.txt.1").read_text() == "a stray's"
    assert not (tmp_path / "stdout.txt").exists()


# Signals


def test_the_first_signal_is_remembered() -> None:
    with Interrupts() as interrupts:
        interrupts.check()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGTERM") as caught:
            interrupts.check()
    assert caught.value.exit_code == 143


def test_the_second_signal_is_an_exception_once_cancelling_has_begun() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        interrupts.cancelling()
        with pytest.raises(SecondSignal):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a third one has nothing to add


def test_two_signals_that_came_before_cancelling() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SecondSignal):
            interrupts.cancelling()


def test_a_request_is_as_good_as_a_signal() -> None:
    with Interrupts() as interrupts:
        interrupts.request(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"):
            interrupts.check()


def test_at_a_terminal_only_a_second_interrupt_in_time_counts(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", clock)
    asked: list[str] = []
    with Interrupts(asked.append) as interrupts:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            interrupts.check()
            clock.sleep(CONFIRM_S)
        assert len(asked) == 2
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGINT"):
            interrupts.check()
    with Interrupts(asked.append) as interrupts:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"):
            interrupts.check()


def test_to_sleep_is_not_to_be_deaf(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", clock)
    monkeypatch.setattr("time.sleep", clock.sleep)
    with Interrupts() as interrupts:
        interrupts.sleep(30.0)
        assert clock.now - 1000 == pytest.approx(30.0, abs=0.2)
        interrupts.sleep(3600.0, lambda: clock.now > 1040)
        assert clock.now - 1000 < 45
        interrupts.request(signal.SIGINT)
        before = clock.now
        interrupts.sleep(3600.0)
        assert clock.now == before


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_a_log_that_is_not_a_regular_file_makes_no_progress(
    bench: Any, clock: Any, log: Path, make: Callable[[Path], None]
) -> None:
    run, progress = bench.run("a"), Progress(bench.root, clock)
    make(log)
    assert progress.idle_s(run) == (0.0, 0)
    clock.now += 5
    assert progress.idle_s(run) == (5.0, 0)


def test_records_of_another_job_are_no_progress(bench: Any, clock: Any, log: Path) -> None:
    run, progress = bench.run("a"), Progress(bench.root, clock)
    log.write_text(_record(1).replace('"version": 1', '"version": 1, "token": "another"'))
    progress.idle_s(run, "0123456789abcdef")
    clock.now += 5
    assert progress.idle_s(run, "0123456789abcdef") == (5.0, 0)
