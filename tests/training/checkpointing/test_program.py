"""The training program saves in the background, goes back one checkpoint, and repeats itself bit for bit."""

import shutil


def test_resume(train, tmp_path):
    sections = {
        "checkpoint": {"save": "ckpt", "load": "ckpt", "save_interval": 5, "async_save": True},
        "optimizer": {"use_distributed_optimizer": True},
        "logger": {"log_progress": True},
    }
    whole = train(2, sections)
    assert "no checkpoint found in ckpt: training starts from scratch" in whole.stdout
    shutil.rmtree(tmp_path / "ckpt" / "iter_0000010")
    resumed = train(2, sections)
    assert "the trackers name iteration 10, which is not complete (missing: " in resumed.stdout
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step > 5}
    assert sorted(resumed.losses) == [6, 7, 8, 9, 10]
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert "Saved async checkpoint\tIteration: 10" in (tmp_path / "ckpt" / "progress.txt").read_text()
