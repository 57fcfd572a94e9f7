"""Scenarios, planned runs and a cluster for tests, which name only what they are about."""

from typing import Any

from cloudai_mbridge.models.loading import LoadedScenario, LoadedTest
from cloudai_mbridge.models.scenario import TestScenario
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.plan import RunPlan


def planned_run(test_id: str = "a", point: int = 0, /, **keys: Any) -> RunPlan:
    """Return a run of the embedded loop on two GPUs of a node."""
    data: dict[str, Any] = {
        **{"key": f"{test_id}/{point}/0", "test_id": test_id, "test_name": "t", "label": str(point), "iteration": 0},
        **{"recipe": "gpt_tiny", "num_nodes": 1, "ranks_per_node": 2, "num_steps": 1, "warmup_steps": 0},
        **{name: {} for name in ("coordinates", "args", "training_config", "definition", "env", "secret_env")},
    }
    return RunPlan(**{**data, **keys})


def slurm_system(**keys: Any) -> SlurmSystem:
    data = {"name": "c", "scheduler": "slurm", "default_partition": "main", "partitions": [{"name": "main"}]}
    return SlurmSystem.model_validate({**data, **keys})


def loaded_scenario(*tests: tuple[dict[str, Any], dict[str, Any]], **scenario: Any) -> LoadedScenario:
    """Load tests given as (keys of the entry, keys of the definition)."""
    runs = [{"id": f"t{i}", "test_name": "n", **run} for i, (run, _) in enumerate(tests)]
    whole = TestScenario.model_validate({"name": "s", "Tests": runs, **scenario})
    definitions = [TestDefinition.model_validate({"name": "n", "description": "d", **keys}) for _, keys in tests]
    return LoadedScenario(whole, [LoadedTest(*pair) for pair in zip(whole.tests, definitions, strict=True)])
