"""The same scenario through a real sbatch, on a real two-node cluster."""

import importlib.metadata
import json
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

pytestmark = [pytest.mark.slurm, pytest.mark.long]
pytest.importorskip("torch")


def command(repository: Path, name: str, system: Path, scenario: str, out: Path) -> list[str | Path]:
    return [
        name,
        *("--system-config", system),
        *("--tests-dir", repository / "test_defs"),
        *("--test-scenario", repository / f"conf/scenarios/{scenario}.toml"),
        *("--output-dir", out),
    ]


@pytest.fixture(scope="module")
def run(mbridge: Any, repository: Path, cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run the sandbox scenario once: (process, report.json, root)."""
    out = tmp_path_factory.mktemp("slurm")
    system = repository / "systems/sandbox.toml"
    done = mbridge(*command(repository, "run", system, "sandbox", out), env=cluster.env, timeout=1500)
    (root,) = out.iterdir()
    return done, json.loads((root / "report.json").read_text()), root


def test_same_verdicts_as_on_this_machine(run: Any) -> None:
    done, report, _ = run
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {point["key"]: point["verdict"] for point in report["points"]}
    accepted = [f"sweep/{name}/0" for name in ("tp1-pp1-mb1", "tp1-pp1-mb2", "tp1-pp2-mb1", "tp1-pp2-mb2")]
    accepted += ["sweep/tp2-pp1-mb1/0", "sweep/tp2-pp1-mb2/0", "two_nodes/single/0"]
    rejected = [f"sweep/{name}" for name in ("tp1-pp1-mb3", "tp1-pp2-mb3", "tp2-pp1-mb3")]
    rejected += [f"sweep/tp2-pp2-mb{mb}" for mb in (1, 2, 3)]
    assert verdicts == dict.fromkeys(accepted, "success") | dict.fromkeys(rejected, "rejected")


def test_one_point_really_ran_on_two_nodes_and_learned_the_same(run: Any, cluster: Any) -> None:
    _, report, _ = run
    points = {point["key"]: point for point in report["points"]}
    two_nodes = points["two_nodes/single/0"]
    assert two_nodes["job"]["nodes"] == "gb200-[1-2]"
    assert two_nodes["run"]["world_size"] == 4
    shown = cluster.run("scontrol", "show", "job", two_nodes["job"]["job_id"]).stdout
    assert "NumNodes=2" in shown
    assert "JobState=COMPLETED" in shown
    losses = [[step["loss"] for step in points[key]["steps"]] for key in ("two_nodes/single/0", "sweep/tp1-pp1-mb1/0")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_jobs_are_not_requeued_and_ran_in_their_directories(run: Any, cluster: Any) -> None:
    _, report, root = run
    for point in report["points"]:
        if point["verdict"] == "success":
            shown = cluster.run("scontrol", "show", "job", point["job"]["job_id"]).stdout
            assert "Requeue=0" in shown
            stdout = Path(shown.partition("StdOut=")[2].splitlines()[0])
            assert stdout.resolve() == root / point["key"] / "stdout.txt"
            assert stdout.with_name("started.txt").read_text().count("job=") == 1


def test_dry_run_without_torch_writes_the_scripts_that_run_submitted(
    run: Any, repository: Path, python_without_torch: Path, tmp_path: Path
) -> None:
    _, _, submitted = run
    argv = command(repository, "dry-run", repository / "systems/sandbox.toml", "sandbox", tmp_path)
    done = subprocess.run(
        [python_without_torch, "-m", "cloudai_mbridge", *argv], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (planned,) = tmp_path.iterdir()
    for name in ("job.sbatch", "training.json", "test.toml"):
        ours = {path.relative_to(submitted): path.read_bytes() for path in submitted.rglob(name)}
        theirs = {path.relative_to(planned): path.read_bytes() for path in planned.rglob(name)}
        assert ours == theirs
        assert len(ours) == 7
    plans = [json.loads((root / "plan.json").read_text()) for root in (submitted, planned)]
    assert plans[0].pop("notes") == []
    (note,) = plans[1].pop("notes")
    assert "Slurm did not report whether it manages GPUs" in note  # no scontrol on this path
    assert [plan.pop("dry_run") for plan in plans] == [False, True]
    assert plans[0] == plans[1]


@pytest.fixture(scope="module")
def python_without_torch(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """An environment that holds the repository and what it needs without extras, and nothing else."""
    home = tmp_path_factory.mktemp("no-torch")
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    for name in requirements(["click", "psutil", "pydantic", "rich", "toml", "tomlkit"]):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    (site / "repository.pth").write_text(str(repository))
    python = home / "bin/python"
    assert subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 1
    return python


def requirements(names: list[str]) -> set[str]:
    """Return the names with everything that they require here."""
    found: set[str] = set()
    while names:
        if (name := names.pop()) not in found:
            found.add(name)
            needed = [Requirement(text) for text in importlib.metadata.distribution(name).requires or ()]
            names += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found
