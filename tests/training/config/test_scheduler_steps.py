"""The schedule in samples: defaults, units, the cut of a warm-up that is too long, and repetition."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from cloudai_mbridge.training.config import SchedulerConfig, TrainingConfig
from cloudai_mbridge.training.config.rules.scheduler_steps import calculate_scheduler_steps, forget_filled_in
from tests.cases import every

ITERS = {"train_iters": 100, "global_batch_size": 8}
SAMPLES = {"train_samples": 1000, "global_batch_size": 8}
STEPS = ("lr_decay_steps", "lr_warmup_steps", "wd_incr_steps", "wsd_decay_steps")


def _container(train: dict[str, Any], scheduler: dict[str, Any]) -> Any:
    return SimpleNamespace(train=TrainingConfig(**train), scheduler=SchedulerConfig(**scheduler))


def _steps(config: Any) -> tuple[Any, ...]:
    return tuple(getattr(config.scheduler, name) for name in STEPS)


@every(
    ("train", "scheduler", "expected"),
    [
        (ITERS, {}, (800, 0, 800, None)),
        (ITERS, {"max_steps": 200, "lr_warmup_fraction": 0.1}, (1600, 160.0, 1600, None)),
        (ITERS, {"max_steps": 200, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 5}, (1600, 0, 1600, 40)),
        (ITERS, {"lr_decay_iters": 50}, (400, 0, 800, None)),
        (ITERS, {"lr_decay_iters": 200, "lr_warmup_iters": 10}, (1600, 80, 800, None)),
        (ITERS, {"lr_warmup_iters": 99}, (800, 792, 800, None)),
        (ITERS, {"lr_warmup_fraction": 0.01}, (800, 8.0, 800, None)),
        (ITERS, {"lr_warmup_fraction": 0.123}, (800, 98.4, 800, None)),
        (ITERS, {"lr_decay_iters": 50, "lr_warmup_fraction": 0.1}, (400, 40.0, 800, None)),
        (ITERS, {"lr_wsd_decay_iters": 5}, (800, 0, 800, 40)),
        (ITERS, {"lr_decay_style": "WSD"}, (800, 0, 800, 800)),
        (ITERS, {"lr_decay_style": "WSD", "lr_decay_iters": 50}, (400, 0, 800, 400)),
        (ITERS, {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5}, (800, 0, 800, 40)),
        (SAMPLES, {}, (1000, 0, 1000, None)),
        (SAMPLES, {"lr_decay_samples": 500, "lr_warmup_samples": 499}, (500, 499, 1000, None)),
        (SAMPLES, {"lr_warmup_fraction": 0.0625}, (1000, 62.5, 1000, None)),
        (SAMPLES, {"lr_wsd_decay_samples": 7}, (1000, 0, 1000, 7)),
        (SAMPLES, {"lr_decay_style": "WSD", "lr_wsd_decay_samples": 7}, (1000, 0, 1000, 7)),
    ],
)
def test_steps(train: dict[str, Any], scheduler: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = _container(train, scheduler)
    calculate_scheduler_steps(config)
    assert _steps(config) == expected


@pytest.mark.parametrize(
    ("scheduler", "expected"), [({}, (1000, 0, 1000, 1000)), ({"lr_decay_samples": 400}, (400, 0, 1000, 400))]
)
def test_the_anneal_of_a_sample_based_run_has_a_default(scheduler: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """Megatron-Bridge leaves it None, and Megatron-Core's scheduler then refuses WSD."""
    config = _container(SAMPLES, {"lr_decay_style": "WSD", **scheduler})
    calculate_scheduler_steps(config)
    assert _steps(config) == expected
    assert config.scheduler.lr_wsd_decay_samples == expected[3]
    assert _learning_rate(config.scheduler, step=expected[0] // 2) == pytest.approx(2 * 0.5**0.5 - 1)


def test_steps_of_a_batch_ramp_are_the_samples_that_it_consumes() -> None:
    """Iterations x final batch size put the peak of a warm-up of 4 steps at step 10, and no end to the decay."""
    train = {"train_iters": 20, "global_batch_size": 16, "micro_batch_size": 1, "rampup_batch_size": [4, 4, 60]}
    config = _container(train, {"lr_warmup_iters": 4, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 5})
    calculate_scheduler_steps(config)
    assert _steps(config) == (228, 16, 228, 80)  # 5 x 4, 3 x 8, 2 x 12, 10 x 16


def _learning_rate(scheduler: SchedulerConfig, step: int) -> float:
    """Ask Megatron-Core for the learning rate at `step`, of a maximum of 1 and a minimum of 0."""
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0}
    built = OptimizerParamScheduler(
        torch.optim.SGD([group]),
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=scheduler.lr_warmup_steps,
        lr_decay_steps=scheduler.lr_decay_steps,
        lr_decay_style=scheduler.lr_decay_style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=scheduler.wd_incr_steps,
        wd_incr_style=scheduler.weight_decay_incr_style,
        wsd_decay_steps=scheduler.wsd_decay_steps,
        lr_wsd_decay_style=scheduler.lr_wsd_decay_style,
    )
    built.step(step)
    return float(built.get_lr({"max_lr": 1.0, "min_lr": 0.0}))


@every(
    ("train", "scheduler"),
    [
        ({**ITERS, "train_iters": 0}, {}),
        (ITERS, {"lr_decay_iters": 0}),
        (ITERS, {"lr_decay_iters": -1}),
        (SAMPLES, {"lr_decay_samples": 0}),
    ],
)
def test_a_decay_of_no_steps_is_refused(train: dict[str, Any], scheduler: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the learning rate decays over"):
        calculate_scheduler_steps(_container(train, scheduler))


@pytest.mark.parametrize("train", [{"train_iters": 10}, {"global_batch_size": 8}], ids=["no batch size", "no length"])
def test_steps_need_a_length_and_a_batch_size(train: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"train.train_iters and train.global_batch_size are needed"):
        calculate_scheduler_steps(_container(train, {}))


@every(
    ("train", "scheduler", "warmup"),
    [
        (ITERS, {"lr_warmup_iters": 100}, 799),
        (ITERS, {"lr_warmup_iters": 2000}, 799),
        (ITERS, {"lr_warmup_fraction": 1.0}, 799),
        (SAMPLES, {"lr_warmup_samples": 1000}, 999),
        ({"train_samples": 1, "global_batch_size": 1}, {"lr_warmup_samples": 1}, 0),
    ],
)
def test_a_warm_up_that_is_too_long_is_cut(train: dict[str, Any], scheduler: dict[str, Any], warmup: int) -> None:
    config = _container(train, scheduler)
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"it is cut to {warmup}"):
            calculate_scheduler_steps(config)
        assert config.scheduler.lr_warmup_steps == warmup


@every(
    ("train", "style", "filled"),
    [
        (ITERS, "linear", {"lr_decay_iters": 100, "lr_wsd_decay_iters": None}),
        (ITERS, "WSD", {"lr_decay_iters": 100, "lr_wsd_decay_iters": 100}),
        (SAMPLES, "linear", {"lr_decay_samples": 1000, "lr_wsd_decay_samples": None}),
        (SAMPLES, "WSD", {"lr_decay_samples": 1000, "lr_wsd_decay_samples": 1000}),
    ],
)
def test_defaults_are_written_into_the_fields(train: dict[str, Any], style: str, filled: dict[str, Any]) -> None:
    config = _container(train, {"lr_decay_style": style})
    calculate_scheduler_steps(config)
    assert {name: getattr(config.scheduler, name) for name in filled} == filled


@every(
    ("scheduler", "train_iters", "between", "expected"),
    [
        # In Megatron-Bridge the decay keeps the length of the first call, and the learning rate then ends too early
        ({"lr_decay_style": "WSD"}, 200, {}, (1600, 0, 1600, 1600)),
        ({"lr_decay_iters": 100}, 200, {}, (800, 0, 1600, None)),
        ({}, 100, {"lr_decay_iters": 50}, (400, 0, 800, None)),
        ({"lr_wsd_decay_iters": 5}, 100, {"lr_wsd_decay_iters": None}, (800, 0, 800, None)),
    ],
)
def test_changes_before_a_second_call(
    scheduler: dict[str, Any], train_iters: int, between: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    config = _container(ITERS, scheduler)
    calculate_scheduler_steps(config)
    config.train.train_iters = train_iters
    for name, value in between.items():
        setattr(config.scheduler, name, value)
    calculate_scheduler_steps(config)
    assert _steps(config) == expected


def test_a_default_that_was_filled_in_does_not_make_two_schedulers_unequal() -> None:
    filled, given = _container(ITERS, {}), _container(ITERS, {"lr_decay_iters": 100})
    calculate_scheduler_steps(filled)
    calculate_scheduler_steps(given)
    assert filled.scheduler == given.scheduler


def test_forgetting_leaves_a_fresh_scheduler() -> None:
    config = _container(SAMPLES, {"lr_decay_style": "WSD"})
    calculate_scheduler_steps(config)
    forget_filled_in(config.scheduler)
    assert (config.scheduler.lr_decay_samples, config.scheduler.lr_wsd_decay_samples) == (None, None)
