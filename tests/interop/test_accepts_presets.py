"""The performance configurations of the real releases, read from their sources as an installed clone, are planned.

The test pins a commit that nobody knows: only the clone says which release it is, and what the launcher fills in.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.megatron_bridge.pins import repo_path
from cloudai_mbridge.megatron_bridge.presets.catalog import catalog
from cloudai_mbridge.megatron_bridge.release import find_release
from cloudai_mbridge.models.loading.load import LoadedTest
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.models.test_definition import MegatronBridgeTestDefinition
from cloudai_mbridge.plan.preview import PlanOptions, SweepPreview

URL = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
COMMIT = "my-branch"
SOURCES = {"0.3.0": "MBRIDGE_LAUNCHER_SOURCE_0_3", "0.6.0": "MBRIDGE_LAUNCHER_SOURCE_0_6"}


@pytest.fixture(params=SOURCES)
def install_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    source = os.environ.get(SOURCES[request.param])
    if not source:
        pytest.skip(f"{SOURCES[request.param]} names no source")
    repo_path(tmp_path, URL, COMMIT).symlink_to(Path(source).resolve())
    return tmp_path


def test_all_performance_configurations_are_planned(install_path: Path) -> None:
    release = find_release(COMMIT, repo_path(install_path, URL, COMMIT))
    assert release is not None
    known = catalog(release)
    assert known is not None
    assert len(known.source.rows) > 200
    for row in known.source.rows:
        args: dict[str, Any] = {
            "model_family_name": row.family or "any",
            "model_recipe_name": row.recipe,
            "gpu_type": row.gpu,
            "compute_dtype": row.compute_dtype,
            "task": row.task,
            "num_gpus": row.num_gpus,
            "config_variant": row.variant or None,
        }
        definition = MegatronBridgeTestDefinition.model_validate(
            {"name": "n", "description": "", "cmd_args": args, "git_repos": [{"url": URL, "commit": COMMIT}]}
        )
        system = SlurmSystem(
            name="c",
            scheduler="slurm",
            default_partition="p",
            partitions=[{"name": "p"}],
            install_path=str(install_path),
        )
        plan = SweepPreview(LoadedTest(TestRun(id="t", test_name="n"), definition), system, PlanOptions())
        (found,) = plan.points()
        assert not found.point.violations, (args, list(map(str, found.point.violations)))
        assert not found.is_held_back, (args, found.headline)
        assert plan.pinned.release == release
