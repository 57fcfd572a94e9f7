"""A run that goes on from a checkpoint, on this machine: its own steps are what is asked of it."""

import functools
from typing import Any

import pytest

pytest.importorskip("torch")

LOCAL = 'name = "l"\nscheduler = "local"\nmonitor_interval = 0.3\n'
SAVED = 'gb = 2\nsave_dir = "ckpt"\nsave_interval = 2\n'
AFTER = '[[Tests.dependencies]]\ntype = "start_post_comp"\nid = "base"\n'
GOES_ON = 'gb = 2\nload_dir = "../../../base/single/0/ckpt"\n'
OWN_SCHEDULE = '[Tests.extra_cmd_args]\n"scheduler.override_opt_param_scheduler" = "true"\n'


def test_steps_behind_the_checkpoint(start_run: Any, stand_in_test: Any) -> None:
    test = functools.partial(stand_in_test, env='OMP_NUM_THREADS = "1"')
    tests = [
        test("base", steps=4, args=SAVED),
        test("more", steps=6, args=GOES_ON) + OWN_SCHEDULE + AFTER,
        test("done", steps=4, args=GOES_ON) + AFTER,
        test("other", steps=6, args=GOES_ON) + AFTER,
    ]
    run = start_run(None, tests, whole_system=LOCAL).finish(1)
    points = run.points()
    more = points["more/single/0"]
    assert more["verdict"] == "success", more["reasons"]
    assert [step["step"] for step in more["steps"]] == [5, 6]
    assert (more["metrics"]["warmup_steps"], more["metrics"]["window"]) == (5, [6, 6])
    assert "nothing was left to train: the checkpoint is at step 4 of max_steps = 4" in str(points["done/single/0"])
    assert "set scheduler.override_opt_param_scheduler=true for this run's" in str(points["other/single/0"])
