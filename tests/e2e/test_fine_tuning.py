"""Fine-tuning from a TOML, on this machine and through sbatch: weights trained further, or adapters beside them."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

LOCAL = 'name = "l"\nscheduler = "local"\nmonitor_interval = 0.3\n'
SLURM = """name = "s"
scheduler = "slurm"
default_partition = "main"
gpus_per_node = 4
monitor_interval = 0.3
[[partitions]]
name = "main"
nodes = [{nodes}]
"""
# Relative to the directory of a point, as in the shipped scenario
BASE = 'pretrained_checkpoint = "../../../base/single/0/ckpt"\n'
AFTER = '[[Tests.dependencies]]\ntype = "start_post_comp"\nid = "base"\n'
SAVED = 'save_dir = "ckpt"\nsave_interval = 3\ngb = 2\n'


def scenario(test: Any, data: Path) -> list[str]:
    """Return a test whose weights are trained further, one that does so with each task, and tests that cannot."""
    tuned = f'{SAVED}data = "squad_packed"\ndataset_root = "{data}"\n'
    lora = f'task = "lora"\ndata = "squad"\ndataset_root = "{data}"\n'
    # Threads of one rank that wait for each other compute for nothing on a busy machine
    test = functools.partial(test, steps=3, env='OMP_NUM_THREADS = "1"')
    return [
        test("base", args=SAVED),
        test("tune", args=f'{tuned}{BASE}task = ["sft", "lora"]\n') + AFTER,
        test("no_data", args=f"{lora}{BASE}".replace(str(data), f"{data}/empty")) + AFTER,
        test("no_weights", args=f'{lora}pretrained_checkpoint = "{data}/empty"\n'),
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lists of ids, and the same backwards; and a directory without any."""
    root, chance = tmp_path_factory.mktemp("data"), random.Random(1)
    (root / "empty").mkdir()
    for name in ("training", "validation"):
        lists = [[str(chance.randrange(3, 40)) for _ in range(chance.randrange(3, 9))] for _ in range(200)]
        lines = [json.dumps({"input": " ".join(ids), "output": " ".join(ids[::-1])}) for ids in lists]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    return root


def check(run: Any) -> None:
    """Both tasks begin with the same weights and samples, and only one of them has adapters."""
    losses, sizes = {}, {}
    for task in ("sft", "lora"):
        point = run.points()[f"tune/task{task}/0"]
        assert point["verdict"] == "success", point["reasons"]
        losses[task] = [step["loss"] for step in point["steps"]]
        assert point["comparability"]["fields"]["args.task"] == task
        directory = run.root / f"tune/task{task}/0"
        assert ("adapters: " in (directory / "stdout.txt").read_text()) is (task == "lora")
        sizes[task] = sum(path.stat().st_size for path in (directory / "ckpt/iter_0000003").rglob("*.distcp"))
    assert losses["sft"][0] == pytest.approx(losses["lora"][0], abs=1e-5)
    assert losses["sft"][1:] != pytest.approx(losses["lora"][1:], abs=1e-5)
    assert sizes["lora"] < sizes["sft"] / 2
    ids = {point["comparability"]["id"] for key, point in run.points().items() if key.startswith("tune/")}
    assert len(ids) == 2


def test_on_this_machine(start_run: Any, stand_in_test: Any, data: Path) -> None:
    run = start_run(None, scenario(stand_in_test, data), whole_system=LOCAL).finish(1)
    check(run)
    messages = {
        "no_data": "training.jsonl cannot be read",
        "no_weights": "empty: checkpoint.pretrained_checkpoint holds no complete checkpoint",
    }
    for test, words in messages.items():
        point = run.point(test)
        assert (point["verdict"], point["failure"]["id"]) == ("failed", "error_message")
        assert words in " ".join(point["failure"]["evidence"])


@pytest.mark.slurm
def test_through_sbatch_with_a_driver_that_is_killed(
    start_run: Any, stand_in_test: Any, new_cluster: Any, data: Path
) -> None:
    sandbox = new_cluster(nodes=1)
    system = SLURM.format(nodes=", ".join(f'"{name}"' for name in sandbox.node_names))
    run = start_run(sandbox, scenario(stand_in_test, data)[:2], whole_system=system)
    run.wait_for_step("base")
    run.kill()
    check(run.resume().finish(0))
