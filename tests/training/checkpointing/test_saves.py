"""What is on the disk after saves: names, what is kept, and what a killed save leaves."""

from pathlib import Path

import pytest

from cloudai_mbridge.training.compat.versions import installed_release

HERE = Path(__file__).parent


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.long
def test_files_and_retention(launch, tmp_path):
    (results,), out = launch(
        1,
        """
import os

def saved(name, steps, **checkpoint):
    run = start(checkpoint={"save": name, **checkpoint})
    for _ in range(steps):
        run.train(1)
        run.save()
    run.finish()
    return sorted(x for x in os.listdir(name) if x.startswith("iter_"))

def scenario():
    results = {
        "all": saved("all", 2),
        "recent": saved("recent", 4, most_recent_k=2),
        "recent async": saved("recent_async", 4, most_recent_k=1, async_save=True),
        "retain": saved("retain", 5, save_retain_interval=2),
        "constant": saved("constant", 3, ckpt_assume_constant_structure=True),
    }
    # leftovers of a killed save: of the same iteration, and of an earlier one
    for name in ("left/iter_0000001", "left/iter_0000000"):
        os.makedirs(name)
        open(name + "/__9_9.distcp", "w").close()
    saved("left", 1, most_recent_k=3)
    # the second stream keeps the newest; loading takes the newer of both
    both = {"save": "two", "load": "two", "non_persistent_ckpt_type": "global"}
    run = start(checkpoint=both)
    positions = []
    for non_persistent in (False, True, True):
        run.train(1)
        run.save(non_persistent)
    losses = run.train(1)
    run = start(checkpoint=both)
    positions.append(run.load())
    results["continues"] = run.train(1) == losses
    run.save()
    positions.append(start(checkpoint=both).load())
    positions.append(start(checkpoint={**both, "non_persistent_ckpt_type": None, "ckpt_step": 1}).load())
    results["positions"] = positions
    constant = start(checkpoint={"load": "constant"})
    # a checkpoint that is there already is not to be saved, and first removed, once more
    results["known"] = []
    for places in ({"load": "all", "save": "all"}, {"load": "all", "save": "elsewhere"}, both):
        again = start(checkpoint=places)
        again.load()
        results["known"].append(getattr(again.state, "last_saved_step", None))
    again.train(1)
    again.save(non_persistent=True)
    again = start(checkpoint=both)
    again.load()
    results["known"].append(getattr(again.state, "last_saved_step", None))
    return results, constant.load()
""",
    )
    results, constant = results
    assert results == {
        "all": ["iter_0000001", "iter_0000002"],
        "recent": ["iter_0000003", "iter_0000004"],
        "recent async": ["iter_0000004"],
        "retain": ["iter_0000002", "iter_0000004", "iter_0000005"],
        "constant": ["iter_0000001", "iter_0000002", "iter_0000003"],
        "continues": True,
        "positions": [[3, 3e9], [4, 4e9], [1, 1e9]],
        "known": [2, None, 4, None],
    }
    assert constant == [3, 3e9]
    assert names(tmp_path / "all") == [
        "iter_0000001",
        "iter_0000002",
        "latest_checkpointed_iteration.txt",
        "latest_train_state.pt",
    ]
    assert (tmp_path / "all" / "latest_checkpointed_iteration.txt").read_text() == "2"
    common = ["common.pt"] if installed_release() in ("0.16", "0.17", "0.18") else []
    inside = [".metadata", "__0_0.distcp", *common, "metadata.json", "run_config.yaml", "train_state.pt"]
    assert names(tmp_path / "all" / "iter_0000001") == inside
    assert names(tmp_path / "left") == ["iter_0000001", *names(tmp_path / "all")[2:]]
    assert names(tmp_path / "left" / "iter_0000001") == inside
    assert names(tmp_path / "two" / "non_persistent")[:1] == ["iter_0000005"]
    assert "  successfully saved checkpoint from iteration       2 to all" in out
    assert "  successfully saved non-persistent checkpoint from iteration       3 to two/non_persistent" in out


KILLED = """
import os, signal, sys
from small_run import *
from megatron.core.dist_checkpointing.strategies import filesystem_async, state_dict_saver
from megatron.core.dist_checkpointing.strategies import torch as strategy
from cloudai_mbridge.training.checkpointing import save

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def killed(mode):
    run = start(checkpoint={"save": "ckpt", "load": "ckpt", "async_save": mode == "async"})
    run.train(1)
    run.save()
    run.finish()
    run.train(1)
    if mode == "data":  # before a byte of the data is written
        for name in ("write_preloaded_data_multiproc", "write_preloaded_data_multithread"):  # by release
            setattr(filesystem_async.FileSystemWriterAsync, name, die)
    elif mode == "index":  # the data is there, the index is not
        strategy.save_state_dict_async_finalize = state_dict_saver.save_state_dict_async_finalize = die
    elif mode == "marker":  # all but our own files
        save.write_torch = die
    elif mode == "tracker":  # complete, and not yet the latest
        save.layout.tracked_iteration = die
    run.save()
    if mode == "async":  # while it is written in the background
        die()

def resume():
    run = start(checkpoint={"save": "ckpt", "load": "ckpt"})
    first = run.load()[0]
    run.train(1)
    run.save()
    again = start(checkpoint={"load": "ckpt"}).load()[0]
    print("RESUMED", first, again, flush=True)

def in_a_process_of_its_own(action, *args):  # without importing everything once more
    child = os.fork()
    if child == 0:
        with cpu.megatron_device():
            action(*args)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

if __name__ == "__main__":
    for mode in ("data", "index", "marker", "async", "tracker"):
        code = in_a_process_of_its_own(killed, mode)
        tracked = open("ckpt/latest_checkpointed_iteration.txt").read()
        print("KILLED", mode, code, tracked, os.path.isdir("ckpt/iter_0000002"), flush=True)
        if mode == "async":
            in_a_process_of_its_own(resume)
"""


@pytest.mark.long
def test_a_killed_save_is_never_the_latest(ranks):
    out = ranks(1, KILLED, env={"PYTHONPATH": str(HERE)}).stdout
    lines = [line for line in out.splitlines() if line.startswith(("KILLED", "RESUMED"))]
    assert lines == [
        "KILLED data -9 1 True",
        "KILLED index -9 1 True",
        "KILLED marker -9 1 True",
        "KILLED async -9 1 True",
        "RESUMED 1 2",
        "KILLED tracker -9 1 True",
    ]
