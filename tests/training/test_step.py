"""The parts of a step that can be told apart from training: losses, skipped iterations, hooks, timers."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cloudai_mbridge.training import step  # noqa: E402
from cloudai_mbridge.training.loop import after_step, exits, param_hooks  # noqa: E402
from cloudai_mbridge.training.process.timers import STEP_TIMER, MonotonicTimers  # noqa: E402

ONE_RANK = """
from cloudai_mbridge.training import cpu
cpu.install()
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with cpu.megatron_device():
    mpu.initialize_model_parallel()
    from cloudai_mbridge.training.step import reduce_losses
    pair = lambda a, b: {"lm loss": torch.tensor([a, b])}
    assert reduce_losses([pair(6.0, 3.0), pair(2.0, 1.0)])["lm loss"].item() == 2.0
    assert reduce_losses([pair(0.0, 0.0)])["lm loss"].item() == 0.0, "no token counts: no NaN"
    assert reduce_losses([{"z": torch.tensor(1.0)}, {"z": torch.tensor([2.0])}])["z"].item() == 1.5
    assert reduce_losses([]) == {}
    try:
        reduce_losses([{"bad": torch.zeros(3)}])
    except ValueError as error:
        assert "'bad'" in str(error) and "(3,)" in str(error), error
    else:
        raise AssertionError("three values are neither")
"""


def test_losses_are_reduced(ranks: Any) -> None:
    ranks(1, ONE_RANK)


@pytest.mark.parametrize(
    ("fsdp", "distributed", "overlap", "expected"),
    [(f, d, o, (f, d, o) == (False, True, True)) for f in (False, True) for d in (False, True) for o in (False, True)],
)
def test_when_there_are_hooks(fsdp: bool, distributed: bool, overlap: bool, expected: bool) -> None:
    assert param_hooks.should_disable_forward_pre_hook(fsdp, distributed, overlap) is expected


def test_only_wrapped_chunks_have_hooks() -> None:
    for function in (param_hooks.enable_forward_pre_hook, param_hooks.disable_forward_pre_hook):
        with pytest.raises(AssertionError, match="Linear has no forward pre-hooks"):
            function([torch.nn.Linear(1, 1)])


class _Buffers:
    """Stands for an optimizer part."""

    def __init__(self) -> None:
        self.copied = 0

    def _copy_main_params_to_param_buffer(self) -> None:
        self.copied += 1


@pytest.mark.parametrize(("reuse", "overlap", "copied"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_main_parameters_are_copied(monkeypatch: pytest.MonkeyPatch, reuse: bool, overlap: bool, copied: int) -> None:
    monkeypatch.setattr(step, "DistributedOptimizer", _Buffers)
    part = _Buffers()
    optimizer = SimpleNamespace(chained_optimizers=[part, object()])
    step._handle_mxfp8_param_buffer_copy(optimizer, reuse, overlap)
    assert part.copied == copied


def test_without_both_flags_the_optimizer_is_not_looked_at() -> None:
    step._handle_mxfp8_param_buffer_copy(object(), False, True)


class _Machine:
    """Stands for the rerun machine in a step that is run once."""

    def __init__(self) -> None:
        self.left = 1

    def should_run_forward_backward(self, iterator: Any) -> bool:
        self.left -= 1
        return self.left >= 0


def _state(kind: str | None, skip: list[int], at: int) -> Any:
    train = SimpleNamespace(iterations_to_skip=skip, micro_batch_size=2)
    progress = SimpleNamespace(step=at, consumed_train_samples=0, skipped_train_samples=0)
    return SimpleNamespace(
        cfg=SimpleNamespace(train=train, dataset=SimpleNamespace(dataloader_type=kind)), train_state=progress
    )


@pytest.fixture
def three_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "get_rerun_state_machine", _Machine)
    monkeypatch.setattr(step, "get_num_microbatches", lambda: 3)
    monkeypatch.setattr(step.mpu, "get_data_parallel_world_size", lambda: 4)


@pytest.mark.usefixtures("three_micro_batches")
@pytest.mark.parametrize(("kind", "drawn"), [("single", 3), (None, 3), ("batch", 1)])
def test_a_skipped_iteration_takes_its_data(kind: str | None, drawn: int) -> None:
    state, data = _state(kind, [7], at=7), iter(range(100))
    assert step._should_skip_and_handle_iteration(state, data) is True
    assert next(data) == drawn
    progress = state.train_state
    assert (progress.step, progress.consumed_train_samples, progress.skipped_train_samples) == (8, 24, 24)


@pytest.mark.usefixtures("three_micro_batches")
def test_a_skipped_iteration_of_virtual_stages() -> None:
    state, data = _state(None, [0], at=0), [iter(range(100)), None, iter(range(100))]
    assert step._should_skip_and_handle_iteration(state, data)
    assert [next(each) for each in data if each is not None] == [3, 3]


@pytest.mark.usefixtures("three_micro_batches")
@pytest.mark.parametrize("skip", [[], [6, 8]])
def test_other_iterations_are_not_skipped(skip: list[int]) -> None:
    state, data = _state(None, skip, at=7), iter(range(100))
    assert step._should_skip_and_handle_iteration(state, data) is False
    assert (next(data), state.train_state.step) == (0, 7)


def test_the_step_timer_runs_at_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudai_mbridge.training.process.timers.synchronize", lambda: None)
    timers = MonotonicTimers(-1, "minmax")
    timer = timers(STEP_TIMER, log_level=0)
    timer.start()
    time.sleep(0.01)
    assert timer.elapsed() > 0.009
    other = timers("forward-compute", log_level=2)
    other.start()
    with pytest.raises(Exception, match="dummy timer"):
        other.elapsed()


def test_a_clock_that_is_set_back_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudai_mbridge.training.process.timers.synchronize", lambda: None)
    timer = MonotonicTimers(0, "minmax")(STEP_TIMER, log_level=0)
    timer.start()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= timer.elapsed() < 1000, "and not the seconds since 1970"


def _fail_outside_step_time(state: Any) -> None:
    with exits.outside_step_time(state):
        time.sleep(1.5)
        raise OSError("full")


def test_time_outside_of_steps_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudai_mbridge.training.process.timers.synchronize", lambda: None)
    timers = MonotonicTimers(0, "minmax")
    state: Any = SimpleNamespace(timers=timers, energy_monitor=None)
    timer = timers(STEP_TIMER, log_level=0)
    start = time.monotonic()
    timer.start()
    with pytest.raises(OSError, match="full"):
        _fail_outside_step_time(state)
    elapsed = timer.elapsed()
    assert elapsed <= time.monotonic() - start - 1.5
    timer.stop()
    with exits.outside_step_time(state):  # a run that does not time its steps now
        pass
    assert not timer._started


class _Chunk(param_hooks.DistributedDataParallel):
    """A wrapped chunk that only remembers what becomes of its hooks."""

    def __init__(self, is_enabled: bool) -> None:
        torch.nn.Module.__init__(self)
        self.remove_forward_pre_hook_handles = {"module": "handle"} if is_enabled else {}
        self.calls: list[Any] = []

    def enable_forward_pre_hook(self) -> None:
        self.calls.append("on")
        self.remove_forward_pre_hook_handles = {"module": "handle"}

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        self.calls.append(("off", param_sync))
        self.remove_forward_pre_hook_handles = {}


@pytest.mark.parametrize(("is_enabled", "calls"), [(True, [("off", True), "on"]), (False, [])])
def test_hooks_are_as_they_were_before(is_enabled: bool, calls: list[Any]) -> None:
    """Those that were off, as before the first step, stay off; an error changes nothing about it."""
    chunk = _Chunk(is_enabled)
    with pytest.raises(OSError, match="full"), param_hooks.without_forward_pre_hooks([chunk]):
        raise OSError("full")
    assert chunk.calls == calls
    assert param_hooks.are_enabled([chunk]) is is_enabled


def test_hooks_come_on_after_the_first_step_that_was_not_skipped() -> None:
    chunk = _Chunk(is_enabled=True)
    chunk.config = SimpleNamespace(param_sync_func="sync")
    config: Any = SimpleNamespace(
        optimizer=SimpleNamespace(use_distributed_optimizer=True),
        ddp=SimpleNamespace(use_megatron_fsdp=False, overlap_param_gather=True),
    )
    hooks = param_hooks.FirstStepHooks(config, [chunk])
    assert (chunk.calls, chunk.config.param_sync_func) == ([("off", False)], None)
    hooks.step_done(skipped=True)
    assert chunk.calls == [("off", False)]
    hooks.step_done(skipped=False)
    assert (chunk.calls, chunk.config.param_sync_func) == ([("off", False), "on"], "sync")
    hooks.step_done(skipped=False)
    hooks.close()
    assert chunk.calls == [("off", False), "on", ("off", True)]


@pytest.mark.parametrize(("iteration", "asks", "left"), [(4, True, 0.0), (5, True, 7e9), (4, False, 7e9)])
def test_flops_are_counted_from_the_last_report(
    monkeypatch: pytest.MonkeyPatch, iteration: int, asks: bool, left: float
) -> None:
    monkeypatch.setattr(after_step.dist, "get_rank", lambda: 0)
    reports: list[Any] = []
    detector = SimpleNamespace(report=lambda flops, interval: reports.append((flops, interval)))
    train = SimpleNamespace(
        train_sync_interval=None,
        check_weight_hash_across_dp_replicas_interval=None,
        manual_gc=False,
        manual_gc_interval=0,
    )
    config: Any = SimpleNamespace(
        train=train,
        logger=SimpleNamespace(log_interval=4),
        straggler=SimpleNamespace(log_straggler=asks),
        profiling=None,
    )
    assert after_step.post_training_step_callbacks([], 7e9, detector, iteration, None, config, False) == left
    assert reports == ([(7e9, 4)] if left == 0 else [])
