"""A system: the cluster or machine that runs jobs, and its defaults."""

from datetime import date, time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from cloudai_mbridge.models.base import EnvName, NoSlurmCredential, OneLine, PrivateText, ShellWords, StrictModel, Text
from cloudai_mbridge.models.credentials import shown_key, shown_value
from cloudai_mbridge.models.shell import slurm_pattern_in
from cloudai_mbridge.models.slurm_values import usable_with_sbatch, usable_with_srun


class Executor(StrEnum):
    """Who starts a run's processes."""

    MBRIDGE = "mbridge"
    NEMO_RUN = "nemo_run"


_PRICES: dict[str, JsonValue] = {"additionalProperties": {"type": "number", "minimum": 0}}


class Prices(StrictModel):
    """Price of a GPU-hour. In the file, GPUs are keys next to the currency: `gb200 = 10.5`."""

    model_config = ConfigDict(json_schema_extra=_PRICES)

    currency: OneLine = Field("USD", description="of the prices")
    per_gpu_hour: dict[OneLine, FiniteFloat] = Field(
        {}, description="GPU -> price of an hour", json_schema_extra=_PRICES
    )

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("must be a table such as {currency = 'USD', gb200 = 10.5}")
        prices = dict(data)
        currency = {"currency": prices.pop("currency")} if "currency" in data else {}
        listed = prices.pop("per_gpu_hour", {})
        if not isinstance(listed, dict):
            raise ValueError(f"per_gpu_hour: {shown_value(listed)} is not a table such as {{gb200 = 10.5}}")
        prices = {**listed, **prices}
        if len({name.lower() for name in prices}) < len(prices):
            raise ValueError(f"{', '.join(map(shown_key, prices))}: a GPU has one price; remove the others")
        for name, value in prices.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                what = f"{shown_key(name)}: {shown_value(value)}"
                raise ValueError(f"{what} is not a price of a GPU-hour; use a number of at least 0")
        return {**currency, "per_gpu_hour": prices}

    @model_serializer
    def _spread(self) -> dict[str, Any]:
        return {"currency": self.currency, **self.per_gpu_hour}


def _default_of(value: Any) -> Any:
    """Return the value of CloudAI's other form of a variable, {default = value}; a date as it was written."""
    if isinstance(value, dict) and "default" in value:
        return value["default"]
    return str(value) if isinstance(value, date | time) else value


def _some(value: Any) -> Any:
    """Return None for 0, which means unset in CloudAI's files."""
    return None if isinstance(value, int | float) and not isinstance(value, bool) and value == 0 else value


def _or_zero(schema: dict[str, Any]) -> None:
    schema.pop("exclusiveMinimum", None)
    schema["minimum"] = 0


_SCALAR = ["string", "number", "boolean", "null"]  # null: taplo's value for inf
EnvValue = Annotated[
    PrivateText | int | float | bool,
    BeforeValidator(_default_of),
    WithJsonSchema(
        {"type": [*_SCALAR, "object"], "required": ["default"], "properties": {"default": {"type": _SCALAR}}}
    ),
]
Count = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_some), Field(json_schema_extra=_or_zero)]


class _System(StrictModel):
    name: Text = Field(description="in reports")
    install_path: Text | None = Field(None, description="where repositories, environments and images are installed")
    output_path: Text = Field("results", description="where the directories of runs are made")
    hf_home_path: Text | None = Field(None, description="CloudAI's; no test of this tool reads it")
    global_env_vars: Annotated[dict[EnvName, EnvValue], NoSlurmCredential] = Field(
        {}, description="variables of every job"
    )
    monitor_interval: Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_some)] = Field(
        None, description="seconds between two looks at the jobs", json_schema_extra=_or_zero
    )
    gpus_per_node: Count = Field(None, description="GPUs of a node, as jobs ask for them")
    gpu_type: OneLine | None = Field(
        None, description="its GPUs, for estimates and presets; a test's cmd_args.gpu_type wins"
    )
    calibration: Text | None = Field(
        None, description="file of `mbridge calibrate`, relative to this one; corrects predictions"
    )
    prices: Prices = Field(Prices(), description="of a GPU-hour, for the cost of a sweep")
    python_executable: Text | None = Field(
        None, description="Python with the train extra on the compute nodes; default: the one that runs mbridge"
    )
    executor: Executor = Field(
        Executor.MBRIDGE, description="who starts the runs: mbridge itself, or nemo_run (needs the nemo-run extra)"
    )
    data_repository: dict[str, Any] | None = Field(None, description="CloudAI's; no effect")
    reports: dict[str, Any] | None = Field(None, description="CloudAI's; no effect: every report is written")


class PartitionGroup(StrictModel):
    """A named part of a partition."""

    name: OneLine = Field(description="of the group")
    nodes: list[OneLine] = Field([], description="its nodes, such as node[01-64]")


class Partition(StrictModel):
    """A Slurm partition; `nodes` is how older CloudAI files list them."""

    name: OneLine = Field(description="as Slurm knows it")
    nodes: list[OneLine] = Field([], description="its nodes, as older CloudAI files list them")
    groups: list[PartitionGroup] = Field([], description="its nodes, in groups")
    slurm_nodes: list[Any] = Field([], description="state that CloudAI keeps in its object; not read")


class LocalSystem(_System):
    """This machine. Points run one after the other, each under its own torchrun."""

    scheduler: Literal["local", "standalone"] = Field(description="this machine")
    warm_start: bool = Field(True, description="whether the ranks start from a process that has imported torch already")

    is_one_machine: ClassVar[bool] = True
    takes_whole_nodes: ClassVar[bool] = False
    default_partition: ClassVar[str] = ""
    partitions: ClassVar[tuple[Partition, ...]] = ()
    default_nodes: ClassVar[list[str]] = []
    preset_gpu: ClassVar[str] = ""  # recipes' presets for a GPU are of clusters
    submits_arrays: ClassVar[bool] = False
    may_support_gpus: ClassVar[bool] = False

    @property
    def is_this_environment(self) -> bool:
        """Whether runs train with the Python that plans them."""
        return self.python_executable is None

    def refused_in(self, path: str) -> str | None:
        """Return the part of an output path that fails jobs, None if safe."""
        return None

    def sees(self, path: str, output_dir: Path, *, is_in_container: bool) -> bool:
        """Return whether this machine and a job see the same file at a path. output_dir: of the runs."""
        return True


class SlurmSystem(_System):
    """A Slurm cluster."""

    scheduler: Literal["slurm"] = Field(description="a Slurm cluster")
    default_partition: Annotated[OneLine, Field(min_length=1)] = Field(description="partition of the jobs")
    partitions: list[Partition] = Field(description="partitions, with their nodes")
    account: OneLine | None = Field(None, description="of the jobs: sbatch --account")
    job_name_prefix: OneLine = Field(
        "", description="what job names begin with, where a site wants its project's name there"
    )
    distribution: OneLine | None = Field(None, description="of the ranks: sbatch --distribution")
    mpi: OneLine | None = Field(None, description="srun --mpi")
    ntasks_per_node: Count = Field(None, description="CloudAI's; the embedded loop runs one torchrun a node")
    cache_docker_images_locally: bool = Field(False, description="CloudAI's; no effect: an installed image is used")
    container_mount_home: bool = Field(False, description="whether the container sees the home directory")
    extra_srun_args: Annotated[ShellWords, AfterValidator(usable_with_srun)] | None = Field(
        None, description="more options of srun"
    )
    extra_sbatch_args: Annotated[list[OneLine], AfterValidator(usable_with_sbatch)] = Field(
        [], description="more options of sbatch"
    )
    extra_transient_status_errors: list[Text] = Field(
        [], description="texts of Slurm errors after which a query is repeated"
    )
    status_retry_pause_seconds: int = Field(10, ge=0, description="CloudAI's; no effect")
    supports_gpu_directives_cache: bool | None = Field(
        None, description="whether jobs may request GPUs; default: whether Slurm's GresTypes contain gpu"
    )
    group_allocated: list[Any] = Field([], description="state that CloudAI keeps in its object; not read")

    is_one_machine: ClassVar[bool] = False
    is_this_environment: ClassVar[bool] = False

    @property
    def default_nodes(self) -> list[str]:
        """Host lists of the nodes in the default partition."""
        own = [each for each in self.partitions if each.name == self.default_partition]
        lists = [*(each.nodes for each in own), *(group.nodes for each in own for group in each.groups)]
        return [nodes for each in lists for nodes in each]

    @property
    def preset_gpu(self) -> str:
        """The GPU for which recipes' presets are chosen, "" if unknown."""
        return (self.gpu_type or "").lower()

    @property
    def takes_whole_nodes(self) -> bool:
        """Whether jobs share their nodes with no other; `--exclusive=user` and `--exclusive=mcs` share them."""
        return "--exclusive" in self.extra_sbatch_args

    @property
    def submits_arrays(self) -> bool:
        return self.executor is Executor.MBRIDGE

    @property
    def may_support_gpus(self) -> bool:
        """Whether only Slurm knows if jobs may ask for GPUs."""
        return self.gpus_per_node is not None and self.supports_gpu_directives_cache is None

    def refused_in(self, path: str) -> str | None:
        """Return the part of an output path that Slurm would expand, which fails the job; None if safe."""
        return slurm_pattern_in(path)

    def sees(self, path: str, output_dir: Path, *, is_in_container: bool) -> bool:
        """Return whether this machine and a job see the same file at a path.

        Only on the mounted file system of the runs' output, `output_dir`, and never inside a container.
        """
        if is_in_container:
            return False
        mount = output_dir.absolute()
        while not mount.is_mount():
            mount = mount.parent
        return mount != Path("/") and Path(path).is_relative_to(mount)

    @property
    def asks_for_gpus(self) -> bool:
        """Whether jobs request a number of GPUs; nodes without GRES would reject such a job."""
        return self.gpus_per_node is not None and self.supports_gpu_directives_cache is not False


System = LocalSystem | SlurmSystem


def slurm_of(system: System) -> SlurmSystem:
    """Return a system whose tests were accepted for Megatron-Bridge's launcher, which needs Slurm."""
    assert isinstance(system, SlurmSystem)
    return system
