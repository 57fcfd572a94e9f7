"""Evaluation: the value, what it leaves behind, and that every rank comes back."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from cloudai_mbridge.training.eval import perplexity, result_lines


def test_the_printed_result() -> None:
    lines = result_lines("iteration 5 on validation set", {"lm loss": 2.0, "mtp_1 loss": 1000.0})
    assert lines[1] == (
        " validation loss at iteration 5 on validation set | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 |"
        " mtp_1 loss value: 1.000000E+03 | mtp_1 loss PPL: 4.851652E+08 | "
    )
    assert lines[0] == lines[2] == "-" * (len(lines[1]) + 1)


def test_a_perplexity_is_bounded() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1e6) == math.exp(20)
    assert math.isnan(perplexity(math.nan))


SCRIPT = """
import json, sys, time
import torch, torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.callbacks import CallbackManager
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.eval import evaluate, evaluate_and_print_results
from cloudai_mbridge.training.gpt_step import forward_step
from cloudai_mbridge.training.initialize import initialize
from cloudai_mbridge.training.setup import build_model
from cloudai_mbridge.training.startup.prepare import prepare
from cloudai_mbridge.training.state import GlobalState

GLOBAL, ITERS = 4, 3


def sample(i):
    tokens = torch.randint(0, 500, (1, 65), generator=torch.Generator().manual_seed(i))
    mask = (torch.arange(64) < 1 + 7 * i % 60).float()[None]
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask,
            "position_ids": torch.arange(64)[None]}


def micro_batches():
    i = mpu.get_data_parallel_rank()
    while True:
        yield sample(i)
        i += mpu.get_data_parallel_world_size()


def global_batches():
    iterator = micro_batches()
    while True:
        rows = [next(iterator) for _ in range(GLOBAL // mpu.get_data_parallel_world_size())]
        yield {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def simple(reported):
    def step(data_iterator, model):
        batch = next(data_iterator)
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

        def loss_function(output, non_loss_data=False):
            if non_loss_data:
                return [dist.get_rank(), output.numel()]
            return output.sum(), torch.tensor(1, dtype=torch.int), {"x": reported(batch)}

        return output, loss_function
    return step


def left_behind():
    "What training finds after an evaluation."
    timer = state.timers("evaluate")
    return [model[0].training, config.timers is timers, machine.get_mode().value, timer._started,
            torch.is_grad_enabled()]


def floats(means):
    return {key: float(value) for key, value in means.items()}


def check(layout):
    found = {}
    run = lambda step, data, process=None, **more: evaluate(state, step, data, model, process, config, **more)
    means, collected, is_over = run(forward_step, micro_batches())
    found["value"], found["rest"], found["left"] = floats(means), [collected, is_over], left_behind()
    found["samples"] = state.train_state.consumed_valid_samples
    manager, found["callbacks"] = CallbackManager(), []
    for event in ("on_eval_start", "on_eval_step_start", "on_eval_end"):
        manager.register(event, lambda context, event=event: found["callbacks"].append([event, *left_behind()]))
    run(forward_step, micro_batches(), callback_manager=manager)
    cfg.dataset.dataloader_type = "batch"
    found["batch"] = floats(run(forward_step, global_batches())[0])
    cfg.dataset.dataloader_type = "single"

    found["one"] = floats(run(simple(lambda b: b["loss_mask"].sum()), micro_batches())[0])
    bad = {"three": simple(lambda b: torch.ones(3)), "stop": simple(lambda b: 1 / 0)}
    for name in bad if layout != "pp2" else ():  # the first stage would wait for the last one
        try:
            run(bad[name], micro_batches())
        except (ValueError, ZeroDivisionError) as error:
            found[name] = str(error)
        found["left after " + name] = left_behind()

    steps = []
    found["print"] = evaluate_and_print_results(state, "iteration 7", forward_step, micro_batches(), model, config)
    found["non-loss"] = run(simple(lambda b: torch.ones(1)), micro_batches(), lambda *a: None)[1]
    found["function"] = run(forward_step, micro_batches(), non_loss_data_func=lambda m: len(m))[1]
    evaluate_and_print_results(state, "quiet", simple(lambda b: torch.ones(1)), micro_batches(), model, config,
                               process_non_loss_data_func=lambda data, step, writer: steps.append([data, step]))
    found["processed"] = steps

    cfg.validation.eval_iters = 0
    found["none"] = list(run(simple(lambda b: torch.ones(1)), micro_batches(), lambda *a: None))
    found["none printed"] = evaluate_and_print_results(state, "zero", forward_step, None, model, config)
    cfg.validation.eval_iters = ITERS

    cfg.train.exit_duration_in_mins = 30
    found["in time"] = run(forward_step, micro_batches())[2]
    if dist.get_rank() == 0:
        state.start_time -= 3600
    found["late"], found["left late"] = list(run(forward_step, micro_batches())), left_behind()
    found["late printed"] = evaluate_and_print_results(state, "late", forward_step, micro_batches(), model, config)
    return found


def reference():
    total = tokens = 0.0
    with torch.no_grad():
        for i in range(GLOBAL * ITERS):
            batch = sample(i)
            output = model[0](batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            total += float((output * batch["loss_mask"]).sum())
            tokens += float(batch["loss_mask"].sum())
    return total / tokens


if __name__ == "__main__":
    cpu.install()
    layout = sys.argv[1]
    with cpu.megatron_device():
        cfg = ConfigContainer.from_yaml("config.json")
        prepare(cfg)
        initialize(cfg)
        state = GlobalState(cfg)
        state.train_state.step, state.train_state.consumed_train_samples = 7, 28
        model = build_model(cfg)
        model[0].train()
        config = model[0].config
        timers = config.timers = state.timers
        machine = get_rerun_state_machine()
        machine.set_mode(RerunMode.VALIDATE_RESULTS)
        found = check(layout)
        if layout != "pp2":
            found["reference"] = reference()
        if state.tensorboard_logger is not None:
            state.tensorboard_logger.flush()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()
"""

SAMPLES = [1 + 7 * i % 60 for i in range(12)]  # the tokens that count in each
BACK = [True, True, "validate_results", False, True]


def _run(
    ranks: Callable[..., Any], tiny: Callable[..., Any], path: Path, layout: str, **model: Any
) -> tuple[Any, list[Any]]:
    sections = {
        "model": {**model, "num_layers": 2},
        "train": {"train_iters": 10, "micro_batch_size": 1, "global_batch_size": 4},
        "validation": {"eval_iters": 3},
        "logger": {"tensorboard_dir": "tb", "log_validation_ppl_to_tensorboard": True},
    }
    (path / "config.json").write_text(json.dumps(tiny(sections)))
    done = ranks(2, SCRIPT, layout)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return done, json.loads(line.removeprefix("FOUND "))


def _scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_two_replicas(ranks: Callable[..., Any], tiny: Callable[..., Any], tmp_path: Path) -> None:
    done, (first, last) = _run(ranks, tiny, tmp_path, "dp2")
    loss = first["reference"]
    for rank, found in enumerate((first, last)):
        assert found["value"] == found["batch"] == {"lm loss": pytest.approx(loss, rel=1e-5)}
        assert found["rest"] == [None, False]
        assert found["samples"] == 12
        mine = SAMPLES[rank::2]
        assert found["one"] == {"x": pytest.approx(sum(mine) / len(mine))}, "a single value is this rank's own"
        assert found["three"] == "loss 'x' has 3 values; a loss function reports one, or [sum, number of tokens]"
        assert found["stop"] == "division by zero"
        assert found["left after three"] == found["left after stop"] == BACK
        assert found["non-loss"] == [[rank, 64], [rank, 64]]
    _check_what_stays(done, first, last)
    (shown,) = [line for line in done.stdout.splitlines() if "validation loss at iteration 7" in line]
    assert shown == f" validation loss at iteration 7 | lm loss value: {last['value']['lm loss']:.6E} | " + (
        f"lm loss PPL: {math.exp(last['value']['lm loss']):.6E} | "
    )
    scalars = _scalars(tmp_path / "tb")
    assert scalars["lm loss validation"] == [(7, pytest.approx(loss, rel=1e-5))]
    assert scalars["lm loss validation vs samples"] == [(28, pytest.approx(loss, rel=1e-5))]
    assert scalars["lm loss validation ppl"] == [(7, pytest.approx(math.exp(loss), rel=1e-4))]
    assert last["processed"] == [[[[1, 64], [1, 64]], 7]]


def test_two_stages(ranks: Callable[..., Any], tiny: Callable[..., Any], tmp_path: Path) -> None:
    done, (first, last) = _run(ranks, tiny, tmp_path, "pp2", pipeline_model_parallel_size=2)
    assert first["value"] == first["batch"] == first["one"] == {}
    assert last["value"] == last["batch"]
    assert last["one"] == {"x": pytest.approx(sum(SAMPLES) / len(SAMPLES))}
    assert first["non-loss"] == []
    assert last["non-loss"] == [[1, 64]] * 4
    assert last["processed"] == [[[[1, 64]] * 4, 7]]
    _check_what_stays(done, first, last)


def _check_what_stays(done: Any, first: dict[str, Any], last: dict[str, Any]) -> None:
    for found in (first, last):
        assert found["left"] == found["left late"] == BACK
        around, inside = [False, *BACK[1:]], [False, False, "disabled", True, False]
        assert found["callbacks"] == [
            ["on_eval_start", *around],
            *[["on_eval_step_start", *inside]] * 3,
            ["on_eval_end", *around],
        ]
        assert (found["print"], found["function"], found["in time"]) == (False, 1, False)
        assert found["none"][0] == {}
        assert found["none"][1] == found["non-loss"]
        assert (found["none"][2], found["none printed"]) == (False, False)
        assert (found["late"], found["late printed"]) == ([None, None, True], True)
    assert first["processed"] == [], "TensorBoard is open on the last rank"
    assert done.stdout.count("timelimit reached") == 2
    assert not [line for line in done.stdout.splitlines() if "loss at late" in line or "loss at zero" in line]
