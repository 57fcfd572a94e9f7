"""What surrounds the steps: how Megatron is brought up again, what a failure waits for, what enters the step time."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from cloudai_mbridge.training import pretrain
from cloudai_mbridge.training import train as loop
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.loop import between_steps
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine
from cloudai_mbridge.training.startup import prepare
from cloudai_mbridge.training.startup.prepare import adapt_to_device
from tests.cases import every

AGAIN = """
import sys
import numpy as np
from cloudai_mbridge.training import cpu
cpu.install()
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calculator
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.initialize import destroy, initialize
from cloudai_mbridge.training.startup.prepare import prepare

config = ConfigContainer.from_yaml("config.json")
prepare(config)
with cpu.megatron_device():
    assert initialize(config)
    assert calculator.get_num_microbatches() == 8
    drawn = np.random.rand()
    config.train.global_batch_size = 2
    assert not initialize(config)
    assert calculator.get_num_microbatches() == 2, "that of this run, not of the one before"
    assert np.random.rand() == drawn
    config.model.context_parallel_size = 2
    try:
        initialize(config)
    except ConfigError as error:
        assert "model.context_parallel_size = 2" in str(error), error
    else:
        raise AssertionError("another layout was taken over")
    destroy()
"""


def test_groups_that_are_up_are_used_as_configured(ranks: Any, tiny: Callable[..., Any], tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny()))
    ranks(1, AGAIN)


class _Timer:
    """Stands for the step timer."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._started = True

    def start(self, barrier: bool = False) -> None:
        self._started = True
        self.calls.append(f"start, barrier={barrier}")

    def stop(self, barrier: bool = False) -> None:
        self._started = False
        self.calls.append("stop")


def _state(timer: _Timer, **more: Any) -> Any:
    return SimpleNamespace(timers=lambda *_, **__: timer, energy_monitor=None, **more)


def test_a_rank_that_failed_waits_for_nobody() -> None:
    timer = _Timer()
    with pytest.raises(OSError, match="full"), between_steps.outside_step_time(_state(timer)):
        raise OSError("full")
    with between_steps.outside_step_time(_state(timer)):
        pass
    assert timer.calls == ["stop", "start, barrier=False", "stop", "start, barrier=True"]


def test_the_progress_log_is_outside_the_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = _Timer()

    @contextmanager
    def timed(*_: Any) -> Any:
        yield

    monkeypatch.setattr(between_steps, "_timed", timed)
    monkeypatch.setattr(between_steps, "save_checkpoint", lambda *_, **__: timer.calls.append("save"))
    monkeypatch.setattr(
        between_steps, "compute_throughputs_and_append_to_progress_log", lambda *_: timer.calls.append("progress log")
    )
    state = _state(
        timer,
        cfg=SimpleNamespace(
            model=None, logger=SimpleNamespace(log_progress=True), checkpoint=SimpleNamespace(async_save=False)
        ),
        train_state=SimpleNamespace(step=3),
        rank_monitor_client=None,
        callback_manager=None,
        checkpoint_manager=None,
    )
    between_steps.save_checkpoint_and_time(state, [], None, None, 0.0, {})
    assert timer.calls == ["stop", "save", "progress log", "start, barrier=True"]
    assert state.last_saved_step == 3


@every(("saved", "num_saves"), [(None, 1), (3, 1), (4, 0)])
def test_a_batch_that_grows_is_saved_once(monkeypatch: pytest.MonkeyPatch, saved: int | None, num_saves: int) -> None:
    sizes, saves = iter([2, 4, 4]), []
    monkeypatch.setattr(loop, "get_num_microbatches", lambda: next(sizes))
    monkeypatch.setattr(loop, "update_num_microbatches", lambda *_, **__: None)
    progress = SimpleNamespace(step=4, consumed_train_samples=8)
    cfg = SimpleNamespace(checkpoint=SimpleNamespace(save="ckpt"))
    state: Any = SimpleNamespace(train_state=progress, cfg=cfg, last_saved_step=saved)
    loop._update_batch_size(state, lambda: saves.append(4))
    assert len(saves) == num_saves


def test_a_rank_that_failed_leaves_no_writer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned: list[str] = []

    def fail(state: Any) -> None:
        state.async_calls_queue = "queue"
        raise OSError("no data")

    monkeypatch.setattr(pretrain, "initialize", lambda *_: True)
    monkeypatch.setattr(pretrain, "setup", fail)
    monkeypatch.setattr(pretrain, "abandon_saves", abandoned.append)
    state: Any = SimpleNamespace(cfg=None, async_calls_queue=None)
    with pytest.raises(OSError, match="no data"):
        pretrain._pretrain(state, None, {})
    assert abandoned == ["queue"]


class _Manager:
    """Stands for a straggler manager."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.is_shut = error, False

    def initialize(self) -> None:
        if self.error is not None:
            raise self.error

    def wrap_train_step_function(self, function: Any) -> Any:
        return "measured"

    def shutdown(self) -> None:
        self.is_shut = True


@pytest.mark.parametrize("error", [None, RuntimeError("no CUPTI")])
def test_straggler_detection_that_fails_on_one_rank_is_dropped_on_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception | None
) -> None:
    asked: list[bool] = []

    def another_rank_failed(is_well: bool, group: Any) -> bool:
        asked.append(is_well)
        return False

    monkeypatch.setattr(loop, "logical_and_across_model_parallel_group", another_rank_failed)
    monkeypatch.setattr(loop.dist, "get_rank", lambda: 0)
    manager = _Manager(error)
    state: Any = SimpleNamespace(nvrx_straggler_manager=manager)
    assert loop._measured_by_nvrx(state) is loop.train_step
    assert (asked, state.nvrx_straggler_manager, manager.is_shut) == ([error is None], None, True)
    assert "no straggler detection" in capsys.readouterr().out


ATTENTION = """
from types import SimpleNamespace
from cloudai_mbridge.training import cpu
cpu.install()
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from cloudai_mbridge.training.models.attention import SDPACoreAttention

dist.init_process_group("gloo")
with cpu.megatron_device():
    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = SimpleNamespace(attention_dropout=0.5, sequence_parallel=False, window_size=None,
                             window_attn_skip_freq=None)
    torch.manual_seed(1)
    query = torch.randn(16, 1, 2, 8)  # the same heads on both ranks
    before = torch.get_rng_state()
    out = SDPACoreAttention(config, 1, None, "self")(query, query, query, None)
    assert torch.equal(torch.get_rng_state(), before), "the ranks' common generator stays in step"
    both = [torch.empty_like(out) for _ in range(2)]
    dist.all_gather(both, out)
    assert not torch.equal(*both), "each rank drops others"

    config.attention_dropout, config.window_size = 0.0, (2, 0)
    query = query[:5]
    out = SDPACoreAttention(config, 1, None, "self")(query, query, query, None)
    assert out.shape == (5, 1, 16)
dist.barrier()
dist.destroy_process_group()
"""


def test_tensor_parallel_ranks_drop_different_attention(ranks: Any) -> None:
    ranks(2, ATTENTION)


@pytest.mark.skipif(has_transformer_engine(), reason="Transformer Engine has such norms")
def test_norms_without_the_engine_have_no_centred_weight(tiny: Callable[..., Any]) -> None:
    config = ConfigContainer.from_dict(tiny({"model": {"layernorm_zero_centered_gamma": True}}))
    assert adapt_to_device(config, has_gpu=False)["model.layernorm_zero_centered_gamma"] is False


@pytest.mark.parametrize("section", ["model", "comm_overlap"])
def test_the_output_layers_gradient_waits_only_where_its_product_is_fused(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    """Megatron-Core computes a gradient that has waited with Apex's extension alone; without, the step crashed."""
    name, given = "defer_embedding_wgrad_compute", {"comm_overlap": {"tp_comm_overlap": False}, "model": {}}
    given["model"]["gradient_accumulation_fusion"] = True
    given[section][name] = True
    for has_extension in (False, True):
        monkeypatch.setattr(prepare, "has_apex_extension", lambda answer=has_extension: answer)
        monkeypatch.setattr(prepare, "has_transformer_engine", lambda: True)
        config = ConfigContainer.from_dict(tiny(given))
        made = prepare.adapt_to_device(config, has_gpu=True)
        assert getattr(getattr(config, section), name) is has_extension
        assert (f"{section}.{name}" in made) is not has_extension


@pytest.mark.drill
def test_overlapped_gathering_changes_no_loss(train: Any, tmp_path: Any) -> None:
    """The hooks go off and on around evaluations, saves and comparisons of the weights."""
    sections = {
        "train": {"train_iters": 7, "check_weight_hash_across_dp_replicas_interval": 2},
        "optimizer": {"use_distributed_optimizer": True},
        "validation": {"eval_iters": 2, "eval_interval": 2},
        "checkpoint": {"save": "ckpt", "save_interval": 3, "async_save": True},
    }
    losses = []
    for overlaps in (False, True):
        (directory := tmp_path / str(overlaps)).mkdir()
        ddp = {"use_distributed_optimizer": True, "overlap_grad_reduce": overlaps, "overlap_param_gather": overlaps}
        losses.append(train(2, {**sections, "ddp": ddp}, directory=directory).losses)
    assert len(losses[0]) == 7
    assert losses[0] == losses[1]
