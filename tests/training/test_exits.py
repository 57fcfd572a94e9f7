"""However a run leaves, it says why, with the right exit code, and leaves a checkpoint that training goes on from."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.training.compat.versions import installed_release
from tests.training.conftest import launcher, processes_in

pytest.importorskip("torch")


SAVE = {"checkpoint": {"save": "ckpt", "load": "ckpt"}}
STEPS = 10
AFTER_A_TIME = (
    "train.exit_duration_in_mins=0",
    "checkpoint.non_persistent_save_interval=1",
    "checkpoint.non_persistent_ckpt_type=global",
)
SIGUSR1 = {"_target_": "signal.Signals", "_call_": True, "_args_": [int(signal.SIGUSR1)]}


@pytest.fixture(scope="module")
def uninterrupted() -> dict[int, float]:
    return {}


def check_goes_on(train: Any, uninterrupted: dict[int, float], tmp_path: Path, step: int) -> None:
    """Resume after `step`, to the end; the losses are those of a run that never stopped."""
    if not uninterrupted:
        (tmp_path / "whole").mkdir()
        uninterrupted.update(train(directory=tmp_path / "whole").losses)
    rest = train(1, SAVE)
    assert rest.losses == {n: loss for n, loss in uninterrupted.items() if n > step}
    assert max(rest.losses) == STEPS


def newest(tmp_path: Path) -> int:
    return int((tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text())


def test_what_is_due_after_a_step_that_is_skipped(train: Any, tmp_path: Path) -> None:
    small = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
    schedule = {"iterations_to_skip": [2, 5], "exit_interval": 6}
    checkpoint = {"save": "ckpt", "save_interval": 3}
    validation = {"eval_interval": 3, "eval_iters": 1}
    done = train(1, {"model": small, "train": schedule, "checkpoint": checkpoint, "validation": validation})
    assert (tmp_path / "ckpt" / "iter_0000003").is_dir()
    assert newest(tmp_path) == 6
    assert [line for line in (3, 6) if f"validation loss at iteration {line} |" in done.stdout] == [3, 6]
    assert "[exiting program at iteration 6]" in done.stdout
    assert sorted(done.losses) == [1, 2, 4, 5]


@pytest.mark.drill
def test_at_an_interval(train: Any, uninterrupted: dict[int, float], tmp_path: Path) -> None:
    done = train(1, SAVE, "train.exit_interval=4")
    assert "[exiting program at iteration 4] datetime: " in done.stdout
    assert max(done.losses) == newest(tmp_path) == 4
    check_goes_on(train, uninterrupted, tmp_path, 4)


@pytest.mark.drill
def test_after_a_time(train: Any, uninterrupted: dict[int, float], tmp_path: Path) -> None:
    done = train(1, SAVE, *AFTER_A_TIME)
    assert "[exiting program after " in done.stdout
    assert max(done.losses) == newest(tmp_path) == 1, "a checkpoint that does not outlive the job is none"
    check_goes_on(train, uninterrupted, tmp_path, 1)


def test_at_the_end_it_saves_once(train: Any, tmp_path: Path) -> None:
    done = train(1, SAVE, "checkpoint.save_interval=5")
    assert done.stdout.count("[after training is done] datetime: ") == 1
    assert newest(tmp_path) == STEPS
    assert done.stdout.count("save-checkpoint") == 2, "at 5 and at 10, not once more at the end"
    again = train(1, SAVE)
    assert again.records == []
    assert newest(tmp_path) == STEPS


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [("persistent_error", 16, "exiting program with code 16"), ("transient_error", 17, "exiting program with code 17")],
)
def test_after_a_suspicious_result(
    train: Any, uninterrupted: dict[int, float], tmp_path: Path, kind: str, code: int, words: str
) -> None:
    """A result that the error injector has spoilt: rerun from a checkpoint, or given up. Neither trains on.

    After a transient error Megatron-Core 0.18 and later save nothing: the next run goes on from the checkpoint before.
    """
    done = train(
        1,
        SAVE,
        "rerun_state_machine.rerun_mode=validate_results",
        "rerun_state_machine.check_for_nan_in_loss=true",
        "rerun_state_machine.error_injection_rate=3",
        f"rerun_state_machine.error_injection_type={kind}",
        code=code,
    )
    assert words in done.stdout
    saves = code == 16 or installed_release() in ("0.16", "0.17")
    assert max(done.losses) < STEPS
    if saves:
        assert newest(tmp_path) == max(done.losses)
    else:
        assert list(tmp_path.glob("ckpt/*")) == []
    check_goes_on(train, uninterrupted, tmp_path, max(done.losses) if saves else 0)


@pytest.mark.long
def test_after_a_signal_to_one_rank(
    train: Any, tiny: Callable[..., dict[str, Any]], uninterrupted: dict[int, float], tmp_path: Path
) -> None:
    """Two ranks; the signal goes to one of them. Both save, and both leave with 0."""
    sections = {**SAVE, "train": {"train_iters": 10**6, "exit_signal_handler": True, "exit_signal": SIGUSR1}}
    (tmp_path / "config.json").write_text(json.dumps(tiny(sections)))
    argv = [*launcher(2), "-m", "cloudai_mbridge.training", "--config", "config.json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(argv, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT, env=env)
    try:
        wait_for(tmp_path / "out", "MBRIDGE_STEP", process)
        rank = [pid for pid in processes_in(tmp_path) if pid != process.pid][-1]
        os.kill(rank, signal.SIGUSR1)
        assert process.wait(60) == 0, (tmp_path / "out").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    text = (tmp_path / "out").read_text()
    assert "[exiting program after receiving SIGTERM.] datetime: " in text
    last = json.loads(text.rpartition("MBRIDGE_STEP ")[2].splitlines()[0])["step"]
    assert newest(tmp_path) == last
    rest = train(2, sections, f"train.exit_interval={last + 1}")
    assert list(rest.losses) == [last + 1]


def wait_for(file: Path, words: str, process: "subprocess.Popen[Any]") -> None:
    end = time.monotonic() + 400
    while time.monotonic() < end and process.poll() is None:
        if words in file.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(file.read_text()[-3000:])
