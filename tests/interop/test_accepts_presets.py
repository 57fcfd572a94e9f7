"""The performance configurations of the real releases are planned with the options of their installed sources."""

from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.constraints import RuleSet
from cloudai_mbridge.estimate.headline import DEFAULT_LIMIT
from cloudai_mbridge.megatron_bridge.preset_rows import catalog
from cloudai_mbridge.megatron_bridge.release import find_release, repo_path
from cloudai_mbridge.models.loading import LoadedTest
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.plan.walk import PointWalk
from tests.interop.conftest import BRIDGE_0_3, BRIDGE_0_6, tree

URL = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
SOURCES = {"0.3.0": BRIDGE_0_3, "0.6.0": BRIDGE_0_6}


@pytest.mark.parametrize("version", SOURCES)
def test_all_performance_configurations_are_planned(version: str, tmp_path: Path) -> None:
    source = tree(SOURCES[version])
    commit, install_path = f"v{version}", tmp_path
    clone = repo_path(install_path, URL, commit)
    clone.symlink_to(source)
    release = find_release(commit, clone)
    assert release is not None
    assert release.clone == clone
    known = catalog(release)
    assert known is not None
    assert len(known.rows) > 200
    for row in known.rows:
        args: dict[str, Any] = {
            "model_family_name": row.family or "any",
            "model_recipe_name": row.recipe,
            "gpu_type": row.gpu,
            "compute_dtype": row.compute_dtype,
            "task": row.task,
            "num_gpus": row.num_gpus,
            "config_variant": row.variant or None,
        }
        definition = TestDefinition.model_validate(
            {"name": "n", "description": "", "cmd_args": args, "git_repos": [{"url": URL, "commit": commit}]}
        )
        system = SlurmSystem(
            name="c",
            scheduler="slurm",
            default_partition="p",
            partitions=[{"name": "p"}],
            install_path=str(install_path),
        )
        plan = PointWalk(LoadedTest(TestRun(id="t", test_name="n"), definition), system, RuleSet.RELEASE, DEFAULT_LIMIT)
        (found,) = plan.points()
        assert not found.violations, (args, list(map(str, found.violations)))
        assert not found.is_held_back, (args, found.headline)
        assert plan.pinned.release == release
