"""The parts of a step that can be told apart from training: losses, skipped iterations, hooks, timers."""

import time
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import every
from tests.golden import Sentence

torch = pytest.importorskip("torch")

from cloudai_mbridge.training import step  # noqa: E402
from cloudai_mbridge.training.compat import quantized  # noqa: E402
from cloudai_mbridge.training.loop import between_steps, param_hooks  # noqa: E402
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


def test_when_there_are_hooks(sentence: Sentence) -> None:
    flags = list(product((False, True), repeat=3))  # Megatron-FSDP, distributed optimizer, overlap
    assert [each for each in flags if param_hooks.should_disable_forward_pre_hook(*each)] == [(False, True, True)]
    for function in (param_hooks.enable_forward_pre_hook, param_hooks.disable_forward_pre_hook):
        with pytest.raises(AssertionError) as caught:
            function([torch.nn.Linear(1, 1)])
        sentence(caught)


class _Buffers:
    """Stands for an optimizer part with the chunks of a dense and an expert one."""

    def __init__(self, calls: list[str], is_stub: bool = False) -> None:
        self.is_stub_optimizer = is_stub
        self.calls, group = calls, SimpleNamespace(param_gather_dispatched=True, param_gather_handle=None)
        chunk = SimpleNamespace(bucket_groups=[group], expert_parallel_bucket_groups=[])
        chunk.zero_grad_buffer = lambda: calls.append("zero")
        self.group, self.model_chunks = group, [chunk, chunk]

    def _copy_main_params_to_param_buffer(self) -> None:
        self.calls.append("copy")


@every(("reuse", "overlap", "copied"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_main_parameters_are_copied(monkeypatch: pytest.MonkeyPatch, reuse: bool, overlap: bool, copied: int) -> None:
    """What was gathered before a step, for an evaluation, is gathered again in it."""
    monkeypatch.setattr(quantized, "DistributedOptimizer", _Buffers)
    calls: list[str] = []
    part = _Buffers(calls)
    optimizer = SimpleNamespace(chained_optimizers=[part, object(), _Buffers(calls, is_stub=True)])
    step._handle_mxfp8_param_buffer_copy(optimizer, reuse, overlap)
    assert calls == ["copy"] * copied
    assert part.group.param_gather_dispatched is not copied


@pytest.mark.parametrize("is_enabled", [False, True])
def test_nothing_is_copied_where_no_hook_would_gather_it(monkeypatch: pytest.MonkeyPatch, is_enabled: bool) -> None:
    """In the first step: the main parameters would stay in the buffer, and be added to the gradients."""
    calls: list[str] = []
    chunk = _Chunk(is_enabled)
    monkeypatch.setattr(chunk, "zero_grad_buffer", lambda: calls.append("zero"))
    monkeypatch.setattr(step.quantized, "copy_main_params", lambda optimizer: calls.append("copy"))
    monkeypatch.setattr(step, "run_schedule", lambda *_, **__: calls.append("forward"))
    monkeypatch.setattr(step, "get_num_microbatches", lambda: 1)
    shared = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=True)
    state: Any = SimpleNamespace(cfg=SimpleNamespace(optimizer=shared, ddp=SimpleNamespace(overlap_param_gather=True)))
    step._forward_backward(None, None, [chunk], SimpleNamespace(zero_grad=lambda: None), state)
    assert calls == ["zero", *["copy"] * is_enabled, "forward"]


def test_a_forced_gather_takes_the_main_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the buffer is that of the gradients, it holds none of the parameters before."""
    monkeypatch.setattr(quantized, "DistributedOptimizer", _Buffers)
    chunk, calls = _Chunk(is_enabled=True), []
    setattr(chunk, param_hooks.STAGE, lambda: quantized.stage(_Buffers(chunk.calls)))
    param_hooks.disable_forward_pre_hook([chunk])
    assert chunk.calls == [OFF, "zero", "copy", "gather"]
    calls = chunk.calls = []
    param_hooks.disable_forward_pre_hook([chunk], param_sync=False)
    assert calls == [OFF]


@every("ends_itself", [True, False])
@every("in_flight", [True, False])
def test_older_releases_finish_a_forced_gather(
    monkeypatch: pytest.MonkeyPatch, ends_itself: bool, in_flight: bool
) -> None:
    """Up to 0.17 a forced one leaves the transposes of FP8 parameters as they were: it is one of the hooks' instead."""
    monkeypatch.setattr(quantized, "is_float8tensor", lambda parameter: True)
    chunk = _Chunk(is_enabled=False)
    chunk.weight = torch.nn.Parameter(torch.zeros(1))
    handle = "handle" if in_flight else None
    group = SimpleNamespace(param_gather_handle=handle, param_gather_dispatched=True)
    if ends_itself:
        group._post_param_sync = None
    group.finish_param_sync = lambda skip_next_bucket_dispatch: chunk.calls.append(
        ("finish", skip_next_bucket_dispatch, group.param_gather_dispatched)
    )
    chunk.bucket_groups = [group]
    quantized.gather(chunk)
    assert chunk.calls == (["gather"] if ends_itself else [("finish", True, in_flight)])


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
@every(("kind", "drawn"), [("single", 3), (None, 3), ("batch", 1)])
def test_a_skipped_iteration_takes_its_data(kind: str | None, drawn: int) -> None:
    state, data = _state(kind, [7], at=7), iter(range(100))
    assert step._should_skip_and_handle_iteration(state, data) is True
    assert next(data) == drawn
    progress = state.train_state
    assert (progress.step, progress.consumed_train_samples, progress.skipped_train_samples) == (8, 24, 24)


@pytest.mark.usefixtures("three_micro_batches")
def test_iterations_of_virtual_stages_and_others() -> None:
    state, data = _state(None, [0], at=0), [iter(range(100)), None, iter(range(100))]
    assert step._should_skip_and_handle_iteration(state, data)
    assert [next(each) for each in data if each is not None] == [3, 3]
    for skip in ([], [6, 8]):
        state, batches = _state(None, skip, at=7), iter(range(100))
        assert step._should_skip_and_handle_iteration(state, batches) is False
        assert (next(batches), state.train_state.step) == (0, 7)


def test_the_step_timer_runs_at_every_level_and_on_a_clock_that_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
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
    timer = MonotonicTimers(0, "minmax")(STEP_TIMER, log_level=0)
    timer.start()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= timer.elapsed() < 1000, "and not the seconds since 1970"


def _fail_outside_step_time(state: Any) -> None:
    with between_steps.outside_step_time(state):
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
    with between_steps.outside_step_time(state):  # a run that does not time its steps now
        pass
    assert not timer._started


OFF = ("off", False)


class _Chunk(param_hooks.DistributedDataParallel):
    """A wrapped chunk that only remembers what becomes of its hooks."""

    def __init__(self, is_enabled: bool) -> None:
        torch.nn.Module.__init__(self)
        self.bucket_groups = self.expert_parallel_bucket_groups = []
        self.remove_forward_pre_hook_handles = {"module": "handle"} if is_enabled else {}
        self.calls: list[Any] = []

    def enable_forward_pre_hook(self) -> None:
        self.calls.append("on")
        self.remove_forward_pre_hook_handles = {"module": "handle"}

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        self.calls.append(("off", param_sync))
        self.remove_forward_pre_hook_handles = {}

    def start_param_sync(self, force_sync: bool) -> None:
        assert force_sync
        assert not torch.is_grad_enabled()
        self.calls.append("gather")


@pytest.mark.parametrize(("is_enabled", "calls"), [(True, [OFF, "gather", "on"]), (False, [])])
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
    hooks = param_hooks.FirstStepHooks(_with_hooks(None), [chunk], is_resumed=True)
    assert (chunk.calls, chunk.config.param_sync_func) == ([OFF], None)
    hooks.step_done(skipped=True)
    assert chunk.calls == [OFF]
    hooks.step_done(skipped=False)
    assert (chunk.calls, chunk.config.param_sync_func) == ([OFF, "on"], "sync")
    hooks.step_done(skipped=False)
    hooks.close()
    assert chunk.calls == [OFF, "on", OFF, "gather"]


@pytest.mark.parametrize(("is_resumed", "calls"), [(True, []), (False, [OFF])])
def test_hooks_are_on_from_the_start_in_a_resumed_run_in_mxfp8(is_resumed: bool, calls: list[Any]) -> None:
    chunk = _Chunk(is_enabled=True)
    chunk.config = SimpleNamespace(param_sync_func="sync")
    hooks = param_hooks.FirstStepHooks(_with_hooks("e4m3"), [chunk], is_resumed)
    assert chunk.calls == calls
    hooks.step_done(skipped=False)
    assert (chunk.config.param_sync_func, param_hooks.are_enabled([chunk])) == ("sync", True)


def _with_hooks(fp8: str | None) -> Any:
    return SimpleNamespace(
        model=SimpleNamespace(fp8=fp8, fp8_recipe="mxfp8"),
        optimizer=SimpleNamespace(use_distributed_optimizer=True),
        ddp=SimpleNamespace(use_megatron_fsdp=False, overlap_param_gather=True),
    )


@every(("iteration", "asks", "left"), [(4, True, 0.0), (5, True, 7e9), (4, False, 7e9)])
def test_flops_are_counted_from_the_last_report(
    monkeypatch: pytest.MonkeyPatch, iteration: int, asks: bool, left: float
) -> None:
    monkeypatch.setattr(between_steps.dist, "get_rank", lambda: 0)
    reports: list[Any] = []
    detector = SimpleNamespace(report=lambda flops, interval: reports.append((flops, interval)))
    off = dict.fromkeys(("train_sync_interval", "check_weight_hash_across_dp_replicas_interval", "manual_gc"))
    config: Any = SimpleNamespace(
        train=SimpleNamespace(**off),
        logger=SimpleNamespace(log_interval=4),
        straggler=SimpleNamespace(log_straggler=asks),
        profiling=None,
    )
    assert between_steps.post_training_step_callbacks([], 7e9, detector, iteration, None, config, False) == left
    assert reports == ([(7e9, 4)] if left == 0 else [])
