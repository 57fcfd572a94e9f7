"""A system: where jobs run and with what defaults."""

from datetime import date, time
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat, model_serializer, model_validator

from cloudai_mbridge.models.base import EnvName, NoSlurmCredential, OneLine, PrivateText, ShellWords, StrictModel, Text
from cloudai_mbridge.models.values.credentials import shown_key, shown_value
from cloudai_mbridge.models.values.slurm_options import usable_with_sbatch, usable_with_srun


class Executor(StrEnum):
    """Who starts a run's processes."""

    MBRIDGE = "mbridge"
    NEMO_RUN = "nemo_run"


class Prices(StrictModel):
    """What a GPU-hour costs. In the file, the GPUs stand beside the currency: `gb200 = 10.5`."""

    currency: OneLine = "USD"
    per_gpu_hour: dict[OneLine, FiniteFloat] = Field({}, description="GPU -> price of an hour")

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
    """Return None for 0, by which CloudAI's files say that nothing is set."""
    return None if isinstance(value, int | float) and not isinstance(value, bool) and value == 0 else value


EnvValue = Annotated[PrivateText | int | float | bool, BeforeValidator(_default_of)]
Count = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_some)]


class _System(StrictModel):
    name: Text
    install_path: Text | None = None
    output_path: Text = "results"
    hf_home_path: Text | None = Field(None, description="CloudAI's; no test of this tool reads it")
    global_env_vars: Annotated[dict[EnvName, EnvValue], NoSlurmCredential] = {}
    monitor_interval: Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_some)] = Field(
        None, description="seconds between two looks at the jobs"
    )
    gpus_per_node: Count = None
    gpu_type: OneLine | None = Field(None, description="its GPUs, for estimates; a test's cmd_args.gpu_type wins")
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
    data_repository: dict[str, Any] | None = None
    reports: dict[str, Any] | None = None


class LocalSystem(_System):
    """This machine. Points run one after the other, each under its own torchrun."""

    scheduler: Literal["local", "standalone"]


class PartitionGroup(StrictModel):
    """A named part of a partition."""

    name: OneLine
    nodes: list[OneLine] = []


class Partition(StrictModel):
    """A Slurm partition; `nodes` is how older CloudAI files list them."""

    name: OneLine
    nodes: list[OneLine] = []
    groups: list[PartitionGroup] = []
    slurm_nodes: list[Any] = Field([], description="state that CloudAI keeps in its object; not read")


class SlurmSystem(_System):
    """A Slurm cluster."""

    scheduler: Literal["slurm"]
    default_partition: Annotated[OneLine, Field(min_length=1)]
    partitions: list[Partition]
    account: OneLine | None = None
    distribution: OneLine | None = None
    mpi: OneLine | None = None
    ntasks_per_node: Count = Field(None, description="CloudAI's; the embedded loop runs one torchrun a node")
    cache_docker_images_locally: bool = False
    container_mount_home: bool = False
    extra_srun_args: Annotated[ShellWords, AfterValidator(usable_with_srun)] | None = None
    extra_sbatch_args: Annotated[list[OneLine], AfterValidator(usable_with_sbatch)] = []
    extra_transient_status_errors: list[Text] = []
    status_retry_pause_seconds: int = Field(10, ge=0)
    supports_gpu_directives_cache: bool | None = Field(
        None, description="whether jobs may ask for GPUs; where the file does not say, Slurm is asked for its GresTypes"
    )
    group_allocated: list[Any] = Field([], description="state that CloudAI keeps in its object; not read")

    @property
    def asks_for_gpus(self) -> bool:
        """Whether jobs say how many GPUs they want; nodes without GRES would refuse such a job."""
        return self.gpus_per_node is not None and self.supports_gpu_directives_cache is not False


System = LocalSystem | SlurmSystem
