"""One-key variants of CloudAI's own files: every key of its models, removed, or with a value of another form."""

import copy
import datetime
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import toml
from cloudai.core import GitRepo
from cloudai.models.scenario import TestRunModel, TestScenarioModel
from cloudai.models.workload import NsysConfiguration, TrainingReportConfig
from cloudai.systems.slurm.slurm_system import DataRepositoryConfig, SlurmGroup, SlurmPartition, SlurmSystem
from cloudai.systems.standalone.standalone_system import StandaloneSystem
from cloudai.workloads.megatron_bridge.megatron_bridge import MegatronBridgeCmdArgs, MegatronBridgeTestDefinition
from pydantic import BaseModel

REMOVED = object()
NUMBERS = (0, 1, "2", 2.0, 2.5, -1, float("inf"), float("nan"))
TEXTS = ("", "text", " spaced ", "a,b", "10:00:00", "10m")
LISTS = ([], [1], ["a"], ["1", "2"], [1, 2], [2.0], [True, False], [[1, 2]])
TABLES = ({}, {"a": 1}, {"a": "b"}, {"a": ["b", "c"]}, {"default": "x"})
VALUES = (REMOVED, *NUMBERS, *TEXTS, True, "true", "yes", *LISTS, *TABLES, datetime.date(2024, 1, 1))
REPOSITORY = {"url": "https://github.com/NVIDIA-NeMo/Run.git", "commit": "main"}


@dataclass
class Files:
    """The parsed files of one configuration."""

    test: dict[str, Any]
    scenario: dict[str, Any]
    system: dict[str, Any]
    name: str = "as they are"
    text: dict[str, str] = field(default_factory=dict)  # instead of the parsed data

    def write(self, directory: Path) -> None:
        for name in ("test", "scenario", "system"):
            (directory / name).mkdir(exist_ok=True)
            text = self.text.get(name) or toml.dumps(getattr(self, name))
            (directory / name / f"{name}.toml").write_text(text, encoding="utf-8")


def cloudais_files(source: Path, system: str = "example_slurm_cluster") -> Files:
    """Return CloudAI's own MegatronBridge test and scenario on one of its systems."""
    tree = source / "conf/experimental/megatron_bridge"
    return Files(
        toml.load(tree / "test/gb200/megatron_bridge_qwen_30b.toml"),
        toml.load(tree / "test_scenario/megatron_bridge_qwen_30b.toml"),
        toml.load(source / f"conf/common/system/{system}.toml"),
    )


def _keys(model: type[BaseModel]) -> list[str]:
    return [info.alias or name for name, info in model.model_fields.items()] + ["unknown_key"]


def places() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield every place in the files where a key of CloudAI's models may stand."""
    tables: tuple[tuple[str, tuple[Any, ...], type[BaseModel]], ...] = (
        ("test", (), MegatronBridgeTestDefinition),
        ("test", ("cmd_args",), MegatronBridgeCmdArgs),
        ("test", ("nsys",), NsysConfiguration),
        ("test", ("training_report",), TrainingReportConfig),
        ("test", ("git_repos", 0), GitRepo),
        ("test", ("nemo_run_repo",), GitRepo),
        ("scenario", (), TestScenarioModel),
        ("scenario", ("Tests", 0), TestRunModel),
        ("scenario", ("Tests", 0, "cmd_args"), MegatronBridgeCmdArgs),
        ("scenario", ("Tests", 0, "nsys"), NsysConfiguration),
        ("system", (), SlurmSystem),
        ("system", ("partitions", 0), SlurmPartition),
        ("system", ("partitions", 0, "groups", 0), SlurmGroup),
        ("system", ("data_repository",), DataRepositoryConfig),
        ("standalone", (), StandaloneSystem),
    )
    yield from ((file, (*path, key)) for file, path, model in tables for key in _keys(model))
    free = {
        ("test", ("extra_env_vars",)): ("NCCL_DEBUG", "with-dash"),
        ("test", ("extra_cmd_args",)): ("a.b", "a[2].b", "+x.y", "~z", "--flag", "a b", "logger.wandb_key"),
        ("system", ("global_env_vars",)): ("NCCL_DEBUG", "with-dash"),
        ("scenario", ("reports",)): ("per_test", "status", "dse", "unknown_key"),
        ("system", ("reports",)): ("tarball", "unknown_key"),
        ("test", ("env_params",)): ("tp",),
        ("test", ("agent_config",)): ("random_seed", "start_action", "unknown_key"),
    }
    yield from ((file, (*path, key)) for (file, path), keys in free.items() for key in keys)


def variants(source: Path, seed: int) -> Iterator[Files]:
    """Yield all variants, shuffled."""
    slurm, standalone = cloudais_files(source), cloudais_files(source, "standalone_system")
    every = [(file, path, value) for file, path in places() for value in VALUES]
    random.Random(seed).shuffle(every)
    for file, path, value in every:
        files = copy.deepcopy(standalone if file == "standalone" else slurm)
        files.test["nemo_run_repo"] = dict(REPOSITORY)
        files.name = f"{file}: {'.'.join(map(str, path))} = {'(removed)' if value is REMOVED else repr(value)}"
        _put(getattr(files, "system" if file == "standalone" else file), path, value)
        yield files


def _put(table: Any, path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        table = table[part] if isinstance(part, int) else table.setdefault(part, {})
    if value is REMOVED:
        table.pop(path[-1], None)
    else:
        table[path[-1]] = copy.deepcopy(value)
