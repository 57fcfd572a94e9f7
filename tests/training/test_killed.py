"""Ranks killed at random moments, also while they save: training goes on from the newest complete checkpoint.

The losses of all runs together are those of one that was never killed.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.figures import Figure
from tests.training.conftest import processes_in, started

pytest.importorskip("torch")

STEPS = 400  # more than all runs together make
CHECKPOINT = {"save": "ckpt", "load": "ckpt", "save_interval": 1, "most_recent_k": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "one": (1, {}, False),
    "dp2": (2, {}, False),
    "dp2-distopt": (2, {}, True),
    "tp2": (2, {"tensor_model_parallel_size": 2}, False),
    "tp2-pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, False),
}


@pytest.mark.parametrize(
    "layout", ["one", *(pytest.param(name, marks=pytest.mark.drill) for name in ("dp2", "tp2-pp2"))]
)
def test_saved_at_5_killed_and_resumed(
    tmp_path: Path, train: Any, tiny: Callable[..., dict[str, Any]], layout: str
) -> None:
    """Steps 6 to 10 are those of a run that was never interrupted, bit for bit; with dropout."""
    processes, model, _ = LAYOUTS[layout]
    sections = {
        "model": {**model, "hidden_dropout": 0.1, "attention_dropout": 0.1},
        "train": {"train_iters": STEPS},
        "checkpoint": {**CHECKPOINT, "save_interval": 5},
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny(sections)))
    text, _ = killed_run(tmp_path, processes, lambda: 0.0, 0, after_step=7)
    saved = newest(tmp_path)
    assert saved >= 5
    resumed = train(processes, sections, f"train.exit_interval={saved + 5}")
    (tmp_path / "whole").mkdir()
    no_checkpoints = {**sections, "checkpoint": {}}
    whole = train(processes, no_checkpoints, f"train.exit_interval={saved + 5}", directory=tmp_path / "whole").losses
    assert resumed.losses == {step: whole[step] for step in range(saved + 1, saved + 6)}
    before = {record["step"]: record["losses"]["lm loss"] for record in records(text)}
    assert {step: whole[step] for step in before if step in whole} == {s: before[s] for s in before if s in whole}


@pytest.mark.parametrize(
    ("kills", "layout", "is_async"),
    [
        pytest.param(2, "dp2-distopt", False, id="2", marks=pytest.mark.drill),
        pytest.param(20, "dp2-distopt", False, id="20", marks=pytest.mark.drill),
        pytest.param(10, "tp2", True, id="10-async", marks=pytest.mark.drill),
    ],
)
def test_killed_again_and_again(
    tmp_path: Path,
    train: Any,
    tiny: Callable[..., dict[str, Any]],
    kills: int,
    layout: str,
    is_async: bool,
    figure: Figure,
) -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    moments = random.Random(seed)
    processes, model, use_distributed_optimizer = LAYOUTS[layout]
    sections = {
        "model": model,
        "train": {"train_iters": STEPS},
        "optimizer": {"use_distributed_optimizer": use_distributed_optimizer},
        "checkpoint": {**CHECKPOINT, "async_save": is_async},
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny(sections)))
    seen: dict[int, float] = {}
    num_in_a_save = 0
    for number in range(kills):
        text, before = killed_run(tmp_path, processes, lambda: moments.uniform(0, 1.5), number, rank=moments.random())
        num_in_a_save += was_saving(tmp_path)
        check_it_went_on(text, before)
        remember(seen, text)
    last = newest(tmp_path) + 2
    # not by fewer iterations: the learning rate depends on their number
    text = train(processes, sections, f"train.exit_interval={last}").stdout
    check_it_went_on(text, last - 2)
    remember(seen, text)
    (tmp_path / "whole").mkdir()
    no_checkpoints = {**sections, "checkpoint": {}}
    whole = train(processes, no_checkpoints, f"train.exit_interval={max(seen)}", directory=tmp_path / "whole").losses
    assert seen == {step: whole[step] for step in seen}
    assert sorted(seen) == list(range(1, max(seen) + 1)), "every step was trained"
    figure(f"{kills} kills, {num_in_a_save} in a save, {max(seen)} steps")


def killed_run(
    directory: Path, processes: int, wait_s: Callable[[], float], number: int, after_step: int = 1, rank: float = 0.0
) -> tuple[str, int]:
    """Start a run, kill a rank some time after a step; return what it printed, and the newest checkpoint before it.

    rank: which one, as a share of all.
    """
    before = newest(directory)
    file = directory / f"out-{number}"
    file.touch()
    process = started(processes, ["-m", "cloudai_mbridge.training", "--config", "config.json"], directory, file)
    try:
        end = time.monotonic() + 400
        while len(records(file.read_text())) < after_step:
            assert process.poll() is None, file.read_text()[-3000:]
            assert time.monotonic() < end, file.read_text()[-3000:]
            time.sleep(0.02)
        time.sleep(wait_s())
        pids = [pid for pid in processes_in(directory) if parent_of(pid) == process.pid] or [process.pid]
        os.kill(pids[int(rank * len(pids))], signal.SIGKILL)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        for pid in processes_in(directory):
            os.kill(pid, signal.SIGKILL)
    return file.read_text(), before


def parent_of(pid: int) -> int:
    """Return a process's parent: a rank's is torchrun, a checkpoint writer's is a rank; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def newest(directory: Path) -> int:
    tracker = directory / "ckpt" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def was_saving(directory: Path) -> bool:
    """Return whether a checkpoint was begun that never became the newest."""
    begun = [int(path.name.removeprefix("iter_")) for path in (directory / "ckpt").glob("iter_*")]
    return max(begun, default=0) > newest(directory)


def records(text: str) -> list[dict[str, Any]]:
    """Return the whole records: the last line may be cut."""
    lines = [line.partition(" ")[2] for line in text.splitlines() if line.startswith("MBRIDGE_STEP ")]
    return [json.loads(line) for line in lines if line.endswith("}")]


def check_it_went_on(text: str, before: int) -> None:
    assert records(text)[0]["step"] == before + 1, text[-3000:]


def remember(seen: dict[int, float], text: str) -> None:
    """Keep the losses; a step that is trained again has to give the same."""
    for record in records(text):
        assert seen.setdefault(record["step"], record["losses"]["lm loss"]) == record["losses"]["lm loss"]
