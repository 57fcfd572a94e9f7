"""A scenario: its tests, their nodes, repetitions and dependencies."""

import graphlib
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from cloudai_mbridge.models.base import AxisOfInt, EnvName, ListOfPaths, OneLine, ShellWords, StrictModel, Text
from cloudai_mbridge.models.slurm_values import SlurmTime, check_nodes


class OnCompletion(StrictModel):
    """Notifications at a run's end."""

    command: list[Text] = Field(
        [], description="program and arguments; gets the run's directory as $MBRIDGE_RUN and JSON on stdin"
    )
    webhook_env: EnvName | None = Field(
        None, description="variable of mbridge's environment that holds a URL, to which the JSON is posted"
    )
    webhook_file: Text | None = Field(None, description="file that holds the URL")

    @model_validator(mode="after")
    def _someone(self) -> Self:
        if self.webhook_env and self.webhook_file:
            raise ValueError("webhook_env and webhook_file exclude each other; remove one")
        if not (self.command or self.webhook_env or self.webhook_file):
            raise ValueError("is empty; set command, webhook_env or webhook_file")
        return self


class RunnerConfig(StrictModel):
    """Limits, patience and retries."""

    max_parallel: int | None = Field(
        None, ge=1, description="runs that may be active at a time; default: one on this machine, no limit on Slurm"
    )
    max_gpu_hours: float | None = Field(
        None, gt=0, description="GPUs x run time over the whole scenario, retries included; needs a time_limit"
    )
    retries: int = Field(2, ge=0, description="fresh jobs for a run that the infrastructure failed")
    fail_fast: bool = Field(False, description="stop everything at the first run that fails")
    hang_timeout_s: float = Field(
        1800.0, gt=0, description="without a step for so long, a running job is cancelled and its stacks kept"
    )
    pre_test_timeout_s: float = Field(3600.0, gt=0, description="nodes that pass no pre_test in this time are excluded")
    patience_s: float = Field(
        1800.0, gt=0, description="how long a scheduler may be silent before mbridge ends, to be resumed"
    )
    settle_s: float = Field(
        15.0, gt=0, description="how long the job of a failed submission is looked for, once the scheduler answers"
    )
    unknown_s: float = Field(
        300.0, gt=0, description="how long a job's state may be unknown before the run counts as lost"
    )
    late_files_s: float = Field(
        60.0, ge=0, description="how long the files of a Slurm job that has ended are waited for, if steps are missing"
    )
    on_completion: OnCompletion | None = Field(None, description="a command and a webhook that are told of the end")


# Keys of a scenario's test that override (or, without test_name, make up) its definition.
DEFINITION_KEYS = (
    *("name", "description", "test_template_name", "cmd_args", "extra_env_vars", "extra_cmd_args"),
    *("extra_container_mounts", "git_repos", "nsys", "metrics", "sweep", "dse_excluded_args"),
    *("agent", "agent_steps", "agent_metrics", "agent_reward_function", "agent_config"),
)


def _or_an_empty_list(schema: dict[str, Any]) -> None:
    del schema["minItems"]


AUTO = "auto"
Nodes = Annotated[OneLine, AfterValidator(check_nodes)]


class Dependency(StrictModel):
    """Order between two tests of a scenario."""

    type: Literal["end_post_comp", "start_post_init", "start_post_comp"] = Field(
        description="start after the other has ended or has started, or be ended when it ends"
    )
    id: Text = Field(description="of the other test")


class TestRun(StrictModel):
    """One entry of `[[Tests]]`: a test of the tests directory by name, or one defined in place."""

    __test__ = False

    id: Text = Field(min_length=1, description="of this entry, in reports and dependencies")
    test_name: Text | None = Field(None, description="name of a test definition; without it, the entry is one itself")
    num_nodes: int | AxisOfInt | None = Field(
        None, description="a list is an axis of the sweep", json_schema_extra=_or_an_empty_list
    )
    nodes: list[Nodes] = Field([], description="nodes to run on, such as node[01-04]")
    exclude_nodes: list[Nodes] = Field([], description="nodes not to run on")
    segment: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None, description="nodes that a job gets together, sbatch --segment; auto: as many as an NVLink domain has"
    )
    weight: int | float = Field(0, description="CloudAI's; no effect")
    iterations: int = Field(1, ge=1, description="runs of every point")
    sol: float | None = Field(None, description="CloudAI's; no effect")
    ideal_perf: float = Field(1.0, description="CloudAI's; no effect")
    time_limit: SlurmTime | None = Field(None, description="of a run: HH:MM:SS, D-HH:MM:SS, minutes, or 90s, 10m, 2h")
    dependencies: list[Dependency] = Field([], description="other tests that this one waits for")
    extra_srun_args: ShellWords | None = Field(None, description="more options of srun, behind the system's")
    # the definition itself, or overrides of the named definition; merged and then checked as a test definition
    name: Text | None = None
    description: Text | None = None
    test_template_name: Text | None = None
    cmd_args: dict[str, Any] | None = None
    extra_env_vars: dict[str, Any] | None = None
    extra_cmd_args: dict[str, Any] | None = None
    extra_container_mounts: list[Text] | None = None
    git_repos: list[dict[str, Any]] | None = None
    nsys: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    sweep: dict[str, Any] | None = None
    dse_excluded_args: ListOfPaths | None = None
    agent: Text | None = None
    agent_steps: int | None = None
    agent_metrics: list[Text] | None = None
    agent_reward_function: Text | None = None
    agent_config: dict[str, Any] | None = None

    @field_validator("num_nodes", mode="before")
    @classmethod
    def _not_set(cls, value: Any) -> Any:
        """Treat 0 and an empty list as unset, as CloudAI does."""
        each = value if isinstance(value, list) else [value]
        if wrong := [one for one in each if isinstance(one, int) and one < (1 if isinstance(value, list) else 0)]:
            raise ValueError(f"{wrong[0]} is not a number of nodes; use at least 1")
        return None if value in (0, []) else value

    @model_validator(mode="after")
    def _named_or_inline(self) -> Self:
        inline = {"name": self.name, "description": self.description, "test_template_name": self.test_template_name}
        missing = [key for key, value in inline.items() if value is None]
        if not self.test_name and missing:
            raise ValueError(f"set test_name, or define the test here (missing: {', '.join(missing)})")
        if self.test_name and self.test_template_name is not None:
            raise ValueError("test_name and test_template_name exclude each other; remove one")
        return self

    def overrides(self) -> dict[str, Any]:
        """Return the definition keys that this entry sets. As in CloudAI, an empty git_repos sets nothing."""
        keys = (key for key in DEFINITION_KEYS if key != "git_repos" or self.git_repos)
        return {key: value for key in keys if (value := getattr(self, key)) is not None}


class TestScenario(StrictModel):
    """A named list of tests."""

    __test__ = False

    name: Text = Field(description="in reports and names of directories")
    tests: list[TestRun] = Field(alias="Tests", min_length=1, description="what runs, one entry a test")
    job_status_check: bool = Field(True, description="CloudAI's; no effect: every run is checked")
    sol_path: Text | None = Field(None, description="CloudAI's; no effect")
    pre_test: Text | None = Field(None, description="a hook that runs first, or a test that checks every node first")
    post_test: Text | None = Field(None, description="a hook that runs last")
    reports: dict[str, Any] | None = Field(None, description="CloudAI's; no effect: every report is written")
    runner: RunnerConfig = Field(RunnerConfig(), description="limits, patience and retries")

    @model_validator(mode="after")
    def _unique_ids(self) -> Self:
        seen: set[str] = set()
        for test in self.tests:
            if test.id in seen:
                raise ValueError(f"duplicate test id {test.id!r}; give every [[Tests]] entry its own id")
            seen.add(test.id)
        return self

    @model_validator(mode="after")
    def _dependencies_have_an_order(self) -> Self:
        waits_for = {test.id: [d.id for d in test.dependencies] for test in self.tests}
        for test_id, others in waits_for.items():
            for other in others:
                if other not in waits_for:
                    raise ValueError(f"test {test_id!r} depends on {other!r}, which is not in the scenario")
        if cycle := find_cycle(waits_for):
            raise ValueError(f"cyclic dependency {' -> '.join(cycle)}; remove one of these dependencies")
        return self


def find_cycle(waits_for: dict[str, list[str]]) -> list[str] | None:
    """Return the tests of one cycle, each waiting for the next, the first one repeated at the end; or None."""
    try:
        graphlib.TopologicalSorter(waits_for).prepare()
    except graphlib.CycleError as error:
        cycle = list(reversed(error.args[1][1:]))
        first = min(cycle, key=list(waits_for).index)
        start = cycle.index(first)
        return [*cycle[start:], *cycle[:start], first]
    return None
