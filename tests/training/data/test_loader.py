"""Batches come in the sampler's order from this process and from workers, which outlive the signal to leave."""

import os
import signal
import subprocess
import sys
import time
from itertools import islice
from typing import Any

import psutil
import pytest
import torch

from cloudai_mbridge.training.data.loader import Share, batches, in_order, micro_batches, stack
from tests.cases import every


class Numbers:
    """Sample i is i, and who read it."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor([index]), "pid": torch.tensor(os.getpid()), "drawn": torch.rand(())}


def read(dataset: Any = None, consumed: int = 0, **options: Any) -> Any:
    requests = micro_batches(in_order(50, 50), Share(2, 0, 1), consumed)
    return batches(dataset or Numbers(), requests, stack, **options)


@pytest.mark.process
@every("workers", [0, 1, 2])
def test_the_order_does_not_depend_on_the_workers(workers: int) -> None:
    taken = list(islice(read(consumed=6, num_workers=workers, persistent_workers=True), 30))
    assert [b["tokens"].flatten().tolist() for b in taken] == [[i % 50, (i + 1) % 50] for i in range(6, 66, 2)]
    readers = {pid for b in taken for pid in b["pid"].tolist()}
    assert len(readers) == max(1, workers)
    assert (os.getpid() in readers) == (workers == 0)


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_reading_leaves_the_models_random_numbers_alone(workers: int) -> None:
    without_draws = read([{"tokens": torch.zeros(1)}] * 50, num_workers=workers)
    before = torch.get_rng_state()
    list(islice(without_draws, 3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.process
def test_workers_draw_by_the_seed() -> None:
    def draws(seed: int) -> list[float]:
        taken = islice(read(num_workers=2, seed=seed), 4)
        return [value for b in taken for value in b["drawn"].tolist()]

    assert draws(1) == draws(1) != draws(2)


@pytest.mark.process
def test_a_failing_sample_is_told_from_a_worker() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            raise ValueError(f"sample {index} is broken")

    with pytest.raises(ValueError, match="sample 0 is broken"):
        next(read(Broken(), num_workers=1))


@pytest.mark.process
def test_workers_live_on_when_the_job_is_signalled_and_leave_when_told() -> None:
    others = psutil.Process().children()
    iterator = read(num_workers=2, surviving_signal=int(signal.SIGTERM))
    first = next(iterator)["tokens"].tolist()
    workers = [child for child in psutil.Process().children() if child not in others]
    assert len(workers) == 2
    subprocess.run(["kill", "-TERM", *(str(w.pid) for w in workers)], check=True)
    time.sleep(0.2)
    assert [first, *(b["tokens"].tolist() for b in islice(iterator, 20))] == [
        [[i % 50], [(i + 1) % 50]] for i in range(0, 42, 2)
    ]
    workers[0].terminate()  # what torch does with a worker that does not answer
    workers[0].wait(timeout=600)
    assert workers[1].is_running()


@pytest.mark.process
def test_a_program_with_surviving_workers_ends() -> None:
    script = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_loader import read
iterator = read(num_workers=2, persistent_workers=True, surviving_signal=15)
print(next(iterator)["tokens"].tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[[0], [1]]"), done.stderr
