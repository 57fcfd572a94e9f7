"""The package offers the names of Megatron-Bridge's `training.config`, and costs nothing until one is asked for."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import cloudai_mbridge.training.config as configs
from tests.cases import every

FUNCTIONS = """
_get_key_config_values _get_mcore_transformer_parent _get_non_default_values mimo_runtime_config_update
_validate_and_sync_distributed_optimizer_settings _validate_fine_grained_activation_offloading
_validate_mixed_precision_consistency runtime_config_update
"""
CLASSES = """
CheckpointConfig ConfigContainer DataloaderConfig DatasetBuildContext DatasetProvider DistributedDataParallelConfig
DistributedInitConfig FaultToleranceConfig FinetuningDatasetConfig GPTDatasetConfig GPTFIMDatasetConfig
InProcessRestartConfig LoggerConfig MockGPTDatasetConfig NVRxStragglerDetectionConfig OptimizerConfig
OptimizerConfigOverrideProvider OptimizerConfigOverrideProviderContext ProfilingConfig RNGConfig
RerunStateMachineConfig SchedulerConfig StragglerDetectionConfig TensorInspectConfig TrainingConfig ValidationConfig
"""
# Classes of other modules that the reference's module offers as well
BESIDES = ("CommOverlapConfig", "MixedPrecisionConfig", "PackedSequenceSpecs", "TokenizerConfig")
CONTAINER_METHODS = """
_calculate_scheduler_steps _validate_and_apply_deterministic_mode _validate_cp_comm_type
_validate_training_scheduler_compatibility from_dict from_yaml get_data_parallel_size log_non_default_values
set_data_parallel_size to_dict to_yaml validate
"""


@every("name", [*FUNCTIONS.split(), *CLASSES.split(), *BESIDES])
def test_every_name_is_there(name: str) -> None:
    found = getattr(configs, name)
    assert isinstance(found, type) is (name not in FUNCTIONS.split())
    assert found.__name__ == name


@every("name", CONTAINER_METHODS.split())
def test_the_methods_of_the_container(name: str) -> None:
    assert callable(getattr(configs.ConfigContainer, name))


def test_the_list_of_names_is_complete() -> None:
    assert sorted(configs.__all__) == sorted([*FUNCTIONS.split(), *CLASSES.split(), *BESIDES])
    assert set(configs.__all__) <= set(dir(configs))


def test_type_checkers_see_the_same_names_in_the_same_modules() -> None:
    tree = ast.parse(Path(configs.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(seen) == sorted(configs.__all__)
    for name, module in seen.items():
        assert getattr(importlib.import_module(str(module)), name) is getattr(configs, name)


def test_a_name_comes_from_its_own_module() -> None:
    assert configs.TrainingConfig.__module__ == "cloudai_mbridge.training.config.train"
    assert configs.ConfigContainer.__module__ == "cloudai_mbridge.training.config.container"


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'TrainConfig'"):
        _ = configs.TrainConfig


@pytest.mark.process
def test_submodules_can_still_be_imported_from_the_package() -> None:
    assert _run("from cloudai_mbridge.training.config import rng; print(rng.__name__)").endswith(".rng")


@pytest.mark.process
def test_torch_is_not_imported_before_it_is_needed() -> None:
    statements = (
        "import cloudai_mbridge.training.config",
        "import cloudai_mbridge.training.config as c; dir(c); c.__all__",
        "import cloudai_mbridge.training.schema; cloudai_mbridge.training.schema.load_schema()",
        "from cloudai_mbridge.training.config import RNGConfig, SchedulerConfig, TrainingConfig",
    )
    check = "import sys; print({'torch', 'megatron', 'yaml'} & set(sys.modules))"
    lines = [line for statement in statements for line in (statement, check)]
    assert _run("\n".join(lines)).split("\n") == ["set()"] * len(statements)


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()
