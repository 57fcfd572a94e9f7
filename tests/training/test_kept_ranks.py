"""Ranks that are kept from run to run leave nothing of one run to the next, and end with a run that fails."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests import kept_ranks
from tests.kept_ranks import KeptRanks
from tests.training.conftest import _SERVER, Finished, Train, run_ranks

pytestmark = pytest.mark.process

Run = Callable[..., Finished]
# in one write, so that the lines of two ranks do not mix
PIDS = "import os; os.write(1, f\"{os.environ.get('RANK', 0)}:{os.getpid()}\\n\".encode())"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Run a script on ranks that this test keeps: run(2, "print(1)", code=1)."""
    kept = KeptRanks(_SERVER)

    def script(processes: int, text: str, code: int | None = 0) -> Finished:
        (tmp_path / "script.py").write_text(text)
        return run_ranks(processes, ["script.py"], tmp_path, None, code, kept=kept)

    yield script
    kept.end()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_leaves_nothing_to_the_next(run: Run, processes: int, tmp_path: Path) -> None:
    started = sorted(run(processes, PIDS).stdout.split())
    run(
        processes,
        "import gc, os, signal, warnings; os.environ['LEFT'] = '1'; os.chdir('/'); gc.disable()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); warnings.simplefilter('error')\n"
        "from megatron.core import parallel_state as mpu\nimport torch.distributed as dist\n"
        "if dist.is_initialized(): mpu.initialize_model_parallel(dist.get_world_size())\nraise SystemExit",
    )
    found = run(
        processes,
        "import gc, os, signal, sys, warnings\nfrom megatron.core import parallel_state as mpu\n"
        "warnings.warn('of this run')\n"
        "print('LEFT' in os.environ, os.getcwd(), gc.isenabled(), signal.getsignal(15) is signal.SIG_DFL,"
        " mpu.model_parallel_is_initialized(), sys.argv)\n",
    )
    assert set(found.stdout.splitlines()) == {f"False {tmp_path} True True False ['script.py']"}
    assert found.stderr.count("of this run") >= processes
    assert sorted(run(processes, PIDS).stdout.split()) == started
    assert len(started) == processes


def test_a_run_that_fails_is_the_only_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank raises and the other waits for it, one is killed, one leaves: next time there are others."""
    monkeypatch.setattr(kept_ranks, "_GRACE_S", 0.5)
    wait = "import os, torch.distributed as dist\nif os.environ['RANK'] == '0': dist.barrier()\n"
    ways = {
        "1 / 0": ["ZeroDivisionError", "script.py", "rank 0: has not ended", "rank 1: 1"],
        "os.kill(os.getpid(), 9)": ["rank 1: has ended with -9"],
        "os._exit(0)": ["rank 1: has ended with 0"],
        "raise SystemExit('told')": ["told", "rank 1: 1"],
    }
    before = set(run(2, PIDS).stdout.split())
    for way, words in ways.items():
        failed = run(2, wait + f"print('in its own output', flush=True)\n{way}", code=1)
        assert all(word in failed.stderr for word in words), failed.stderr
        assert failed.stdout == "in its own output\n"
        others = set(run(2, PIDS).stdout.split())
        assert len(others) == 2
        assert not others & before
        before = others
    for pid in (int(each.partition(":")[2]) for each in before):
        os.kill(pid, signal.SIGKILL)  # between two runs
    assert "has ended with -9" in run(2, PIDS, code=1).stderr
    assert len(run(2, PIDS).stdout.split()) == 2


def test_one_rank_ends_with_its_own_code(run: Run) -> None:
    assert run(1, "raise SystemExit(3)", code=None).returncode == 3
    assert run(1, "import os; os._exit(0)", code=None).returncode == 1, "it has not ended its run"


def test_ranks_that_hang_are_ended(tmp_path: Path) -> None:
    kept = KeptRanks(_SERVER)
    (tmp_path / "script.py").write_text(PIDS + "\nimport time\ntime.sleep(100000)")
    hung = kept.run(1, ["script.py"], tmp_path, dict(os.environ), timeout=1.0)
    assert (hung.returncode, hung.stderr) == (1, "rank 0: has not ended\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(hung.stdout.strip().partition(":")[2]), 0)
    kept.end()


@pytest.mark.kept_ranks
@pytest.mark.parametrize("layout", [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}])
def test_layouts_follow_each_other(train: Train, layout: dict[str, int]) -> None:
    sections = {"model": {"num_layers": 2, **layout}, "train": {"train_iters": 2, "global_batch_size": 2}}
    alone = train(1, {**sections, "model": {"num_layers": 2}}).losses
    assert train(2, sections).losses == pytest.approx(alone, abs=1e-5)
