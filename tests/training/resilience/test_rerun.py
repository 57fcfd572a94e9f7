"""The rerun machine: every transition on gloo, and the defects of Megatron-Core's that ours does not have."""

import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from megatron.core import rerun_state_machine as mcore

from cloudai_mbridge.training.config.rerun import RerunStateMachineConfig
from cloudai_mbridge.training.resilience.rerun_machine import (
    DeterminismStats,
    RerunMachine,
    initialize_rerun,
    relative_difference,
)
from tests.cases import every

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def leave_no_machine() -> Iterator[None]:
    yield
    mcore.destroy_rerun_state_machine()


def machine(tracker: str | None = None, **config: Any) -> RerunMachine:
    section: Any = SimpleNamespace(rerun_state_machine=RerunStateMachineConfig(**config))
    initialize_rerun(section, tracker)
    made = mcore.get_rerun_state_machine()
    assert isinstance(made, RerunMachine)
    return made


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.drill), 2])
def test_every_transition(processes: int, ranks: Callable[..., Any]) -> None:
    done = ranks(processes, (HERE / "rerun_transitions.py").read_text())
    assert done.stdout.count("all transitions hold") == processes


def test_the_singleton_is_ours_and_may_be_set_again() -> None:
    first = machine()
    second = machine(rerun_mode="validate_results", error_injection_rate=7, spiky_loss_factor=3.0)
    assert mcore.get_rerun_state_machine() is second is not first
    assert second.mode == mcore.RerunMode.VALIDATE_RESULTS
    assert second.error_injector.error_injection_rate == 7
    assert second.spiky_loss_factor == 3.0


@every(
    ("first", "second", "difference"),
    [
        (1.5, 1.5, 0.0),
        (0.0, 0.0, 0.0),
        (1.0, 3.0, 1.0),
        (-1.0, -3.0, 1.0),
        (2.0, -2.0, math.inf),  # the sum is 0
        (0.0, 1.0, 2.0),
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.nan, math.inf, math.inf),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (math.inf, 1.0, math.inf),
        (1.5e308, 1.0e308, 0.4),  # the sum is not finite
    ],
)
def test_default_comparison(first: float, second: float, difference: float) -> None:
    assert relative_difference(first, second) == pytest.approx(difference)
    tensors = [torch.tensor(value, dtype=torch.float64) for value in (second, first)]
    assert relative_difference(*tensors) == pytest.approx(difference)


def test_statistics_travel_whole() -> None:
    stats = DeterminismStats(max_size=2)
    for value in (0.0, 3.0, 1.0, 2.0):
        stats.record(value)
    copy = pickle.loads(pickle.dumps(stats))
    assert vars(copy) == vars(stats) == {"samples": [2.0, 1.0], "pos": 3, "zero_cnt": 1, "max": 3.0, "max_size": 2}
    copy.record(5.0)
    assert copy.samples == [2.0, 5.0]


def test_unexpectedly_large_is_against_the_largest_of_the_first_values() -> None:
    made = machine()

    def is_large(value: float) -> bool:
        return made.is_unexpectedly_large(torch.tensor(value), threshold=10, context="loss", num_samples=3)

    assert [is_large(value) for value in (1.0, -2.0, math.nan, 100.0)] == [False] * 4  # the NaN is not a sample
    assert [is_large(value) for value in (999.0, -1000.0, 1001.0, math.inf)] == [False, True, True, False]


def test_iterations_to_skip(tmp_path: Path) -> None:
    tracker = tmp_path / "tracker.txt"
    rows = [
        ("a", 0, 5, "rerun_disabled"),
        ("b", 0, 5, "rerun_disabled"),  # twice on one rank: skip
        ("a", 0, 6, "rerun_disabled"),  # once
        ("a", 0, 7, "second_rerun_reproducible"),
        ("a", 1, 7, "second_rerun_reproducible"),  # two ranks in one job: not this iteration's data
        ("b", 0, 7, "second_rerun_reproducible"),
        ("a", 0, 8, "initial_run"),
        ("b", 0, 8, "first_rerun_not_reproducible"),  # not reproducible: nothing to skip
        ("a", 0, 9, "RerunValidationStatus.FIRST_RERUN_REPRODUCIBLE"),  # as Megatron-Core writes it
        ("b", 0, 9, "first_rerun_reproducible"),
    ]
    tracker.write_text(
        "".join(
            f"ts=2025-01-01 00:00:00 node=n device=0 jobID={job} rank={rank} iteration={iteration} status={status} "
            "result=nan message='loss'\n"
            for job, rank, iteration, status in rows
        )
    )
    assert RerunMachine.get_skipped_iterations_from_tracker_file(str(tracker)) == [5, 9]


def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = tmp_path / "tracker.txt"
    made = machine(str(tracker))
    monkeypatch.setenv("SLURM_JOBID", "41")
    made.current_iteration = 3
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"iteration 3: Unexpected result nan \(message='loss'\)"):
            made.validate_result(torch.tensor(math.nan), torch.isnan, "loss")
    assert "jobID=41 rank=0 iteration=3 status=rerun_disabled result=nan message='loss'" in tracker.read_text()
    assert made.get_skipped_iterations_from_tracker_file(str(tracker)) == [3]


def test_a_tracker_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cannot be appended to"):
        machine(str(tmp_path / "missing" / "tracker.txt"))


def test_a_result_is_kept_without_its_graph() -> None:
    """It has to go into a checkpoint."""
    made = machine(rerun_mode="validate_results")
    made.first_iteration_complete = True
    assert made.should_run_forward_backward(None)
    weight = torch.ones((), requires_grad=True)
    made.validate_result(weight * 2, lambda _: True, "loss")
    assert not made.initial_result.requires_grad
    assert made.initial_result.item() == 2.0
