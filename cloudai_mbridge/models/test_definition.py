"""A test definition: one benchmark as written in a TOML of the tests directory."""

import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator

from cloudai_mbridge.models.base import (
    AxisOfText,
    EnvName,
    ListOfPaths,
    NoSlurmCredential,
    Overrides,
    PrivateText,
    ShellWords,
    StrictModel,
    Text,
)
from cloudai_mbridge.models.cmd_args import MegatronBridgeCmdArgs
from cloudai_mbridge.models.credentials import find_credential

Pattern = dict[Text, Any]


class SweepConfig(StrictModel):
    """How the axes combine, which points are left out or added, in which order, and how many run.

    Axes are named as in the report: an argument by its name, a variable as env.NAME, and num_nodes.
    """

    zip: list[list[Text]] = Field([], description="groups of axes of equal length that vary together")
    exclude: list[Pattern] = Field(
        [], description="points to leave out: {axis = value or list of values}, all must match"
    )
    include: list[Pattern] = Field([], description="points to add: {argument = value}, the rest as in cmd_args")
    repeats: int = Field(1, ge=1, description="runs of every point, on top of the scenario's iterations")
    order: Literal["grid", "random", "informative"] = Field(
        "grid", description="last axis fastest; shuffled by `seed`; or what tells most first (docs/estimate.md)"
    )
    seed: int = Field(0, ge=0, description="of the random order")
    max_points: int | None = Field(None, ge=1, description="accepted points to run; the rest is held back")
    max_gpu_hours: FiniteFloat | None = Field(
        None, gt=0, description="over all runs, as predicted where the GPU is known, else GPUs x time limit"
    )
    memory_share: FiniteFloat | None = Field(
        None, gt=0, description="hold back points predicted to need more of a GPU; None: only `sweep plan` does, at 0.9"
    )


TEMPLATE = "MegatronBridge"
# Agents: every point of the grid is run, or a search chooses (docs/tune.md)
GRID_SEARCH, TUNE = "grid_search", "tune"
DEFAULT_REPORT = "nsys-%h"  # nsys puts the host name there: the nodes share a directory


class GitRepo(StrictModel):
    """A repository pinned at a commit, branch or tag."""

    url: PrivateText = Field(description="without credentials")
    commit: Text = Field(description="commit, branch or tag")
    mount_as: Text | None = Field(None, description="where it is mounted in the container")
    init_submodules: bool = Field(False, description="whether its submodules are installed, too")
    installed_path: Text | None = Field(None, description="CloudAI's record of its installation; not read")

    @field_validator("url")
    @classmethod
    def _no_password(cls, value: str) -> str:
        if re.match(r"[a-z+]+://[^/@]*:[^/@]*@|https?://[^/@]*@", value, re.IGNORECASE) or find_credential(value):
            raise ValueError("may hold a credential; remove the part before the @ and use a git credential helper")
        return value


NEMO_RUN = GitRepo(url="https://github.com/NVIDIA-NeMo/Run.git", commit="main")  # if nemo_run_repo is not set


class NsysConfiguration(StrictModel):
    """Options of `nsys profile`."""

    enable: bool = Field(True, description="false: the table has no effect")
    nsys_binary: ShellWords = Field("nsys", description="the program, and words before its command")
    task: ShellWords = Field("profile", description="the command of nsys")
    output: Text | None = Field(None, description=f"-o: name of the reports; default: {DEFAULT_REPORT}")
    sample: Text | None = Field(None, description="-s: how CPUs are sampled")
    trace: Text | None = Field(None, description="-t: what is traced, such as cuda,nvtx")
    force_overwrite: bool | None = Field(None, description="--force-overwrite")
    capture_range: Text | None = Field(None, description="--capture-range")
    capture_range_end: Text | None = Field(None, description="--capture-range-end")
    cuda_graph_trace: Text | None = Field(None, description="--cuda-graph-trace")
    gpu_metrics_devices: Text | None = Field(None, description="--gpu-metrics-devices")
    extra_args: list[ShellWords] = Field([], description="more options")

    @property
    def command(self) -> tuple[str, ...]:
        """Return the words that precede the program, in CloudAI's order; each report is named after its host."""
        valued = (("-s", self.sample), ("-o", self.output or DEFAULT_REPORT), ("-t", self.trace))
        options = (
            ("force-overwrite", None if self.force_overwrite is None else str(self.force_overwrite).lower()),
            ("capture-range", self.capture_range),
            ("capture-range-end", self.capture_range_end),
            ("cuda-graph-trace", self.cuda_graph_trace),
            ("gpu-metrics-devices", self.gpu_metrics_devices),
        )
        return (
            *(word for text in (self.nsys_binary, self.task) for word in shlex.split(text)),
            *(word for flag, value in valued if value for word in (flag, value)),
            *(f"--{name}={value}" for name, value in options if value),
            *(word for text in self.extra_args for word in shlex.split(text)),
        )


class TrainingReportConfig(StrictModel):
    """CloudAI's window of statistics."""

    exclude_start_steps: int = Field(5, ge=0, description="as metrics.warmup_steps, which wins")
    exclude_post_profiling_steps: int = Field(2, ge=0, description="no effect: see docs/coming-from-cloudai.md")


class MetricsConfig(StrictModel):
    """Which steps the statistics are taken over. Ours; CloudAI always takes the last ten records."""

    warmup_steps: int = Field(3, ge=0, description="first steps left out of every statistic")


class TestDefinition(StrictModel):
    """One benchmark; list values in `cmd_args` make it a sweep."""

    __test__ = False  # not a test class, despite its name

    name: Text = Field(description="by which scenarios find it")
    description: Text = Field(description="what it measures")
    test_template_name: Text = Field(TEMPLATE, description=f"{TEMPLATE}; tests of other templates are CloudAI's alone")
    cmd_args: MegatronBridgeCmdArgs = Field(
        default_factory=MegatronBridgeCmdArgs, description="arguments; a list is an axis of the sweep"
    )
    extra_env_vars: Annotated[dict[EnvName, PrivateText | AxisOfText], NoSlurmCredential] = Field(
        {}, description="variables of the job; a list is an axis of the sweep"
    )
    extra_cmd_args: Overrides = Field(
        {},
        description="fields of the training configuration, such as optimizer.lr, or options of the upstream launcher",
    )
    extra_container_mounts: list[Text] = Field([], description="mounts of the container, as HOST:CONTAINER")
    git_repos: list[GitRepo] = Field([], description="repositories to install, such as Megatron-Bridge")
    nemo_run_repo: GitRepo | None = Field(None, description="NeMo-Run for the upstream launcher; default: its main")
    nsys: NsysConfiguration | None = Field(None, description="profile with Nsight Systems")
    metrics: MetricsConfig = Field(MetricsConfig(), description="which steps the statistics are taken over")
    training_report: TrainingReportConfig | None = Field(None, description="CloudAI's window of statistics")
    sweep: SweepConfig = Field(SweepConfig(), description="how axes combine, and which points run")
    dse_excluded_args: ListOfPaths = Field([], description="paths such as cmd_args.x whose lists are values, not axes")
    predictor: dict[str, Any] | None = Field(None, description="CloudAI's; no effect")
    agent: Text = Field(GRID_SEARCH, description=f"{GRID_SEARCH}: every point; {TUNE}: what a search chooses")
    agent_steps: int | None = Field(None, description="trials of a search at most")
    agent_metrics: list[Text] = Field(["default"], description="CloudAI's; not read")
    agent_reward_function: Text = Field("inverse", description="CloudAI's; not read")
    agent_config: dict[str, Any] | None = Field(None, description="CloudAI's; not read")
    env_params: dict[str, Any] = Field({}, description="CloudAI's; refused by `run`")

    @property
    def warmup_key(self) -> str:
        """The key that sets how many steps the statistics exclude, "" if unset."""
        if "warmup_steps" in self.metrics.model_fields_set:
            return "metrics.warmup_steps"
        return "training_report.exclude_start_steps" if self.training_report else ""

    def warmup_steps(self, num_steps: int | None) -> int:
        """Return how many steps a run of `num_steps` excludes; the default keeps one step to measure."""
        if self.training_report and self.warmup_key.startswith("training_report"):
            return self.training_report.exclude_start_steps
        if self.warmup_key or num_steps is None:
            return self.metrics.warmup_steps
        return max(0, min(self.metrics.warmup_steps, num_steps - 1))

    @model_validator(mode="after")
    def _known_template(self) -> "TestDefinition":
        if self.test_template_name != TEMPLATE:
            raise ValueError(f"test_template_name is {self.test_template_name!r}; this tool runs {TEMPLATE!r} only")
        return self


def last_warmup_step(first: int, warmup_steps: int, num_steps: int | None, defined: Mapping[str, Any]) -> int:
    """Return the last step of the warm-up of a training that begins with step `first`.

    warmup_steps: as planned from step 1. defined: the test as plain data without its defaults; the default number
    leaves one step to measure.
    """
    is_given = defined.get("training_report") or "warmup_steps" in (defined.get("metrics") or {})
    if first > 1 and num_steps is not None and not is_given:
        warmup_steps = max(0, min(warmup_steps, num_steps - first))
    return first - 1 + warmup_steps
