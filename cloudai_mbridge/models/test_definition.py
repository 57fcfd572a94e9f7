"""A test definition: one benchmark as written in a TOML of the tests directory."""

import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from cloudai_mbridge.models.base import AxisOfText, DottedKey, EnvName, StrictModel, Text
from cloudai_mbridge.models.cmd_args import MegatronBridgeCmdArgs
from cloudai_mbridge.models.sweep import SweepConfig

TEMPLATE = "MegatronBridge"


class GitRepo(StrictModel):
    """A repository pinned at a commit, branch or tag."""

    url: Text
    commit: Text
    mount_as: Text | None = None
    init_submodules: bool = False

    @field_validator("url")
    @classmethod
    def _no_password(cls, value: str) -> str:
        if re.match(r"[a-z+]+://[^/@]*:[^/@]*@|https?://[^/@]*@", value, re.IGNORECASE):
            raise ValueError("holds a password; take it out and use a git credential helper")
        return value


class NsysConfiguration(StrictModel):
    """Options of `nsys profile`."""

    enable: bool = True
    nsys_binary: Text = "nsys"
    task: Text = "profile"
    output: Text | None = None
    sample: Text | None = None
    trace: Text | None = None
    force_overwrite: bool | None = None
    capture_range: Text | None = None
    capture_range_end: Text | None = None
    cuda_graph_trace: Text | None = None
    gpu_metrics_devices: Text | None = None
    extra_args: list[Text] = []


class MetricsConfig(StrictModel):
    """Which steps the statistics are taken over. Ours; CloudAI always takes the last ten records."""

    warmup_steps: int = Field(3, ge=0, description="first steps left out of every statistic")


class MegatronBridgeTestDefinition(StrictModel):
    """One benchmark; list values in `cmd_args` make it a sweep."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    name: Text = Field(min_length=1)
    description: Text
    test_template_name: Text = TEMPLATE
    cmd_args: MegatronBridgeCmdArgs = Field(default_factory=MegatronBridgeCmdArgs)
    extra_env_vars: dict[EnvName, Text | AxisOfText] = {}
    extra_cmd_args: dict[DottedKey, Text] = {}
    extra_container_mounts: list[Text] = []
    git_repos: list[GitRepo] = []
    nemo_run_repo: GitRepo | None = None
    nsys: NsysConfiguration | None = None
    metrics: MetricsConfig = MetricsConfig()
    sweep: SweepConfig = SweepConfig()
    dse_excluded_args: list[Text] = Field([], description="paths such as cmd_args.x whose lists are values, not axes")
    predictor: dict[str, Any] | None = None
    agent: Text = "grid_search"
    agent_steps: int | None = None
    agent_metrics: list[Text] = ["default"]
    agent_reward_function: Text = "inverse"
    agent_config: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _known_template(self) -> "MegatronBridgeTestDefinition":
        if self.test_template_name != TEMPLATE:
            raise ValueError(f"test_template_name is {self.test_template_name!r}; this tool runs {TEMPLATE!r} only")
        return self
