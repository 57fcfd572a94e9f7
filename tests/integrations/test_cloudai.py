"""The workload in CloudAI's registry.

CloudAI is not on the package index, so `cloudai.core` is a STAND-IN here: the names, signatures and calls of NVIDIA's
CloudAI 1.6, as far as this workload touches them, written for this test. The cluster is real.
"""

import sys
import time
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, ConfigDict

from cloudai_mbridge import integrations
from cloudai_mbridge.integrations.cloudai import TEMPLATE, register


class StandInRegistry:
    """CloudAI's registry is a singleton; its maps live on the class."""

    systems_map: ClassVar[dict[str, type]] = {}
    test_definitions_map: ClassVar[dict[str, type]] = {}
    reports_map: ClassVar[dict[type, set[type]]] = {}
    command_gen_strategies_map: ClassVar[dict[tuple[type, type], type]] = {}

    def add_test_definition(self, name: str, value: type) -> None:
        if name in self.test_definitions_map:
            raise ValueError(f"Duplicating implementation for '{name}'")
        self.test_definitions_map[name] = value

    def add_command_gen_strategy(self, system_type: type, tdef_type: type, value: type) -> None:
        if (system_type, tdef_type) in self.command_gen_strategies_map:
            raise ValueError("Duplicating implementation")
        self.command_gen_strategies_map[system_type, tdef_type] = value

    def add_report(self, tdef_type: type, value: type) -> None:
        self.reports_map.setdefault(tdef_type, set()).add(value)


class StandInTestDefinition(BaseModel):
    __test__ = False
    model_config = ConfigDict(extra="forbid")
    name: str
    description: str
    test_template_name: str
    cmd_args: Any
    dse_excluded_args: list[str] = []
    extra_env_vars: dict[str, str | list[str]] = {}
    extra_cmd_args: dict[str, str] = {}
    extra_container_mounts: list[str] = []
    git_repos: list[Any] = []
    nsys: Any = None
    agent: str = "grid_search"
    agent_steps: int = 1
    agent_metrics: list[str] = ["default"]


class StandInCommandGenStrategy:
    TEST_RUN_DUMP_FILE_NAME = "test-run.toml"

    def __init__(self, system: Any, test_run: Any) -> None:
        self.system, self.test_run = system, test_run


class StandInReport:
    metrics: ClassVar[list[str]] = ["default"]

    def __init__(self, system: Any, tr: Any) -> None:
        self.system, self.test_run = system, tr


@dataclass
class StandInJobStatusResult:
    is_successful: bool
    error_message: str = ""


@dataclass
class StandInTestRun:
    __test__ = False
    name: str
    test: Any
    num_nodes: int
    nodes: list[str]
    output_path: Path = Path()
    time_limit: str | None = None
    pre_test: Any = None
    post_test: Any = None
    extra_srun_args: str | None = None


@dataclass
class StandInSlurmSystem:
    name: str = "cluster"
    default_partition: str = "main"
    partitions: list[Any] = field(default_factory=list)
    account: str | None = None
    mpi: str = "none"
    gpus_per_node: int = 4
    global_env_vars: dict[str, Any] = field(default_factory=dict)
    extra_srun_args: str | None = None
    extra_sbatch_args: list[str] = field(default_factory=list)


STAND_IN = {
    "METRIC_ERROR": -1.0,
    "CommandGenStrategy": StandInCommandGenStrategy,
    "JobStatusResult": StandInJobStatusResult,
    "Registry": StandInRegistry,
    "ReportGenerationStrategy": StandInReport,
    "TestDefinition": StandInTestDefinition,
}
ACTIVE = ("PENDING", "RUNNING", "COMPLETING")
OURS = "cloudai_mbridge.integrations.cloudai_workload"


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Put the stand-in where `cloudai.core` would be, with a fresh registry that knows a Slurm system."""
    package, module = types.ModuleType("cloudai"), types.ModuleType("cloudai.core")
    vars(module).update(STAND_IN)
    vars(package)["core"] = module
    monkeypatch.setitem(sys.modules, "cloudai", package)
    monkeypatch.setitem(sys.modules, "cloudai.core", module)
    forget_ours()
    for name in ("systems_map", "test_definitions_map", "reports_map", "command_gen_strategies_map"):
        monkeypatch.setattr(StandInRegistry, name, {})
    StandInRegistry.systems_map["slurm"] = StandInSlurmSystem
    yield module
    forget_ours()


def forget_ours() -> None:
    """Have the next `register()` import our classes again, from the `cloudai.core` of that moment."""
    sys.modules.pop(OURS, None)
    vars(integrations).pop("cloudai_workload", None)


def test_absent_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudai", None)
    result = register()
    assert not result
    assert "install NVIDIA's CloudAI" in result.message
    assert len(result.message.splitlines()) == 1


@pytest.mark.usefixtures("core")
def test_it_adds_definition_command_and_report_once() -> None:
    assert register().message == f"CloudAI has {TEMPLATE} now"
    assert register().message == f"CloudAI has {TEMPLATE} already"
    definition = StandInRegistry.test_definitions_map["MegatronBridgeEmbedded"]
    assert issubclass(definition, StandInTestDefinition)
    strategy = StandInRegistry.command_gen_strategies_map[StandInSlurmSystem, definition]
    assert issubclass(strategy, StandInCommandGenStrategy)
    (report,) = StandInRegistry.reports_map[definition]
    assert issubclass(report, StandInReport)


def test_what_does_not_fit_is_said_not_raised(core: Any) -> None:
    StandInRegistry.systems_map.clear()
    assert "call register() after" in register().message
    del core.CommandGenStrategy
    forget_ours()
    assert "CommandGenStrategy" in register().message
    core.Registry = object
    vars(core).update({"CommandGenStrategy": StandInCommandGenStrategy})
    assert "add_test_definition" in register().message
    assert not register()


def make(tmp_path: Path, env: dict[str, str] | None = None, **args: Any) -> StandInTestRun:
    """Return a test run of the registered template, as CloudAI makes it of a TOML."""
    register()
    definition = StandInRegistry.test_definitions_map[TEMPLATE]
    values = {"model_recipe_name": "gpt_tiny", "compute_dtype": "fp32", "num_gpus": 2, "tp": 2, "max_steps": 5}
    test = definition(
        name="mine",
        description="d",
        test_template_name=TEMPLATE,
        cmd_args={**values, **args},
        extra_env_vars=env or {},
    )
    return StandInTestRun("run 1", test, 1, [], tmp_path / "o $(touch pwned)", "00:05:00")


def strategy_of(tr: StandInTestRun, system: Any) -> Any:
    return StandInRegistry.command_gen_strategies_map[type(system), type(tr.test)](system, tr)


@pytest.mark.usefixtures("core")
def test_constraints_are_ours(tmp_path: Path) -> None:
    system = StandInSlurmSystem()
    tr = make(tmp_path)
    assert tr.test.constraint_check(tr, system)
    assert tr.test.constraint_check(tr)
    tr.test.cmd_args.gb = 7  # as CloudAI's sweep sets it
    tr.test.cmd_args.mb = 2
    assert not tr.test.constraint_check(tr, system)
    with pytest.raises(Exception, match="C04"):
        strategy_of(tr, system).gen_exec_command()


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"tp": [1, 2]}, "CloudAI has to expand it first"),
        ({"hf_token": "hf_NeverToBeSeen"}, "HF_TOKEN"),
        ({"model_recipe_name": "nothing"}, "nothing"),
    ],
)
def test_what_it_cannot_run_is_refused(tmp_path: Path, args: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said) as caught:
        strategy_of(make(tmp_path, **args), StandInSlurmSystem()).gen_exec_command()
    assert "NeverToBeSeen" not in str(caught.value)
    with pytest.raises(Exception, match="launcher"):
        make(tmp_path, launcher="megatron_bridge")


@pytest.mark.usefixtures("core")
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.slurm
def test_a_run_as_cloudai_drives_it(tmp_path: Path, cluster: Any) -> None:
    nasty = '"; touch pwned; $(touch pwned)'
    tr = make(tmp_path, env={"MBRIDGE_NASTY": nasty})
    system = StandInSlurmSystem()
    (report_class,) = StandInRegistry.reports_map[type(tr.test)]
    report = report_class(system, tr)
    assert not report.can_handle_directory()
    assert report.get_metric("default") == -1.0
    assert not tr.test.was_run_successful(tr).is_successful

    strategy = strategy_of(tr, system)
    submitted = cluster.run("bash", "-c", strategy.gen_exec_command(), cwd=tmp_path).stdout
    assert submitted.startswith("Submitted batch job ")
    strategy.store_test_run()
    stored = tomllib.loads((tr.output_path / "test-run.toml").read_text())
    assert stored["cmd_args"]["tp"] == 2
    job_id = submitted.split()[-1]
    assert not tr.test.was_run_successful(tr).is_successful  # it has not ended
    while (
        cluster.run("squeue", "--noheader", f"--jobs={job_id}", "--states=all", "--format=%T").stdout.strip() in ACTIVE
    ):
        time.sleep(0.2)

    result = tr.test.was_run_successful(tr)
    assert result.is_successful, result.error_message
    assert report.can_handle_directory()
    report.generate_report()
    assert report.results_file.is_file()
    assert 0 < report.get_metric("default") == report.get_metric("step-time")
    assert report.get_metric("tflops-per-gpu") > 0
    assert report.get_metric("no such metric") == -1.0
    assert not list(tmp_path.rglob("*pwned"))
