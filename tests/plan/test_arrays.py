"""Which runs share a job array, and what is written for one."""

import os
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.launch.script import array_script, render_array_script
from cloudai_mbridge.launch.write import write_arrays
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.plan.build import MOST_TASKS, assign_arrays
from cloudai_mbridge.schedulers.slurm.jobs import array_batches
from tests.runs import planned_run, slurm_system

SLURM = slurm_system()


def _run(point: int, **keys: Any) -> RunPlan:
    return planned_run("a", point, **keys)


def _places(*runs: RunPlan, system: Any = SLURM) -> list[tuple[str, int]]:
    assigned = assign_arrays(runs, system)
    assert [run.key for run in assigned] == [run.key for run in runs]
    return [(run.array, run.array_index) for run in assigned]


def test_runs_that_need_the_same_share_an_array() -> None:
    assert _places(*(_run(i) for i in range(3))) == [("arrays/0", 0), ("arrays/0", 1), ("arrays/0", 2)]


def test_what_differs_only_in_its_training_shares_an_array() -> None:
    runs = (_run(0, env={"A": "1"}, training_config={"x": 1}), _run(1, env={"A": "2"}, test_id="b", num_steps=9))
    assert _places(*runs) == [("arrays/0", 0), ("arrays/0", 1)]


@pytest.mark.parametrize(
    "other",
    [
        {"num_nodes": 2},
        {"ranks_per_node": 4},
        {"segment": 1},
        {"time_limit": "5"},
        {"nodes": ("n1",)},
        {"exclude_nodes": ("n1",)},
        {"secret_env": {"HF_TOKEN": "x"}},
        {"upstream": object()},
        {"is_pre_test": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_needs_something_else_does_not(other: dict[str, Any]) -> None:
    assert _places(_run(0), _run(1, **other), _run(2)) == [("arrays/0", 0), ("", 0), ("arrays/0", 1)]


def test_other_credentials_are_other_needs() -> None:
    runs = [_run(i, secret_env={"HF_TOKEN": str(i % 2)}) for i in range(4)]
    assert _places(*runs) == [("arrays/0", 0), ("arrays/1", 0), ("arrays/0", 1), ("arrays/1", 1)]


def test_a_run_alone_is_no_array() -> None:
    assert _places(_run(0)) == [("", 0)]
    assert _places(_run(0), _run(1, num_nodes=2)) == [("", 0), ("", 0)]


@pytest.mark.parametrize(
    "system",
    [LocalSystem(name="l", scheduler="local"), SLURM.model_copy(update={"executor": "nemo_run"})],
    ids=["local", "nemo_run"],
)
def test_only_our_own_slurm_scripts_make_arrays(system: Any) -> None:
    assert _places(_run(0), _run(1), system=system) == [("", 0), ("", 0)]


@pytest.mark.parametrize(
    ("count", "sizes"), [(1000, [1000]), (1001, [1000]), (1002, [1000, 2]), (2500, [1000, 1000, 500])]
)
def test_an_array_has_at_most_a_thousand_tasks(count: int, sizes: list[int]) -> None:
    places = _places(*(_run(i) for i in range(count)))
    found = Counter(array for array, _ in places if array)
    assert list(found.values()) == sizes
    assert MOST_TASKS == 1000
    assert max(index for _, index in places) == 999
    assert len({place for place in places if place[0]}) == sum(sizes)


# What a cluster allows


def test_a_cluster_that_allows_fewer_indices() -> None:
    runs = assign_arrays([_run(i) for i in range(5)], SLURM)
    assert [[run.array_index for run in batch] for batch in array_batches(runs, 1001)] == [[0, 1, 2, 3, 4]]
    assert [[run.array_index for run in batch] for batch in array_batches(runs, 3)] == [[0, 1, 2], [3], [4]]
    assert [[run.array_index for run in batch] for batch in array_batches(runs, 0)] == [[0], [1], [2], [3], [4]]


def test_batches_keep_their_order() -> None:
    runs = assign_arrays([_run(0, num_nodes=2), _run(1), _run(2), _run(3, num_nodes=4)], SLURM)
    assert [[run.label for run in batch] for batch in array_batches(runs, 1001)] == [["0"], ["1", "2"], ["3"]]


# What is written


def test_the_script_of_an_array() -> None:
    first = assign_arrays([_run(0, time_limit="5", exclude_nodes=("n9",)), _run(1)], SLURM)[0]
    text = render_array_script("arrays/3", replace(first, array="arrays/3"), SLURM)
    assert (
        text
        == """\
#!/bin/bash
#SBATCH --job-name=mbridge-a-array-3
#SBATCH --partition=main
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=5
#SBATCH --exclude=n9
#SBATCH --output=arrays/3/%a/stdout.txt
#SBATCH --error=arrays/3/%a/stderr.txt
#SBATCH --open-mode=append
#SBATCH --no-requeue
# mbridge arrays/3: each task runs the script of the run that its link names
cd -P arrays/3/"$SLURM_ARRAY_TASK_ID" && exec bash job.sbatch
"""
    )


def _written(root: Path) -> tuple[RunPlan, ...]:
    """Write two arrays below a root, and the scripts that their runs would start."""
    runs = assign_arrays([_run(i, num_nodes=1 + i % 2) for i in range(4)], SLURM)
    for run in runs:
        (root / run.key).mkdir(parents=True)
        (root / run.key / "job.sbatch").write_text(f'echo {run.key}; pwd -P; echo "$@"\n')
    write_arrays(runs, SLURM, root)
    return runs


def test_links_lead_to_the_runs(tmp_path: Path) -> None:
    for run in _written(tmp_path):
        link = tmp_path / run.array / str(run.array_index)
        assert link.is_symlink()
        assert not os.path.isabs(link.readlink())  # a directory may be moved
        assert link.resolve() == tmp_path / run.key
        assert (tmp_path / array_script(run.array)).is_file()
    assert len(list(tmp_path.glob("arrays/*/array.sbatch"))) == 2


@pytest.mark.process
def test_each_task_runs_the_script_of_its_run(tmp_path: Path) -> None:
    root = tmp_path / "a root with 'spaces"
    root.mkdir()
    for run in _written(root):
        done = subprocess.run(
            ["bash", array_script(run.array)],
            cwd=root,
            env={**os.environ, "SLURM_ARRAY_TASK_ID": str(run.array_index)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines() == [run.key, str(root / run.key), ""]


@pytest.mark.process
def test_a_task_without_a_run_fails(tmp_path: Path) -> None:
    run = _written(tmp_path)[0]
    env = {**os.environ, "SLURM_ARRAY_TASK_ID": "99"}
    done = subprocess.run(["bash", array_script(run.array)], cwd=tmp_path, env=env, capture_output=True, check=False)
    assert done.returncode != 0
