"""The frozen decisions about one run, and the plan of a whole scenario."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudai_mbridge.constraints import Violation
from cloudai_mbridge.megatron_bridge.launcher_plan import UpstreamPlan
from cloudai_mbridge.models.scenario import RunnerConfig
from cloudai_mbridge.plan.launchers import RunLauncher, launcher_of


@dataclass(frozen=True)
class SearchPlan:
    """What a search knows of a point beforehand.

    groups: seconds of a step's parts, as in `StepGroups`; () where nothing is predicted. memory_share: predicted peak
    over what the GPU has; None: not known. max_trials: points that the search may try; None: any number.
    is_again: the run repeats its point if the search wants to know it better. is_calibrated: the prediction was fitted
    to the cluster. is_guess: it is another GPU's, as nothing is known of this device.
    """

    groups: tuple[float, ...] = ()
    memory_share: float | None = None
    max_trials: int | None = None
    is_again: bool = False
    is_calibrated: bool = False
    is_guess: bool = False


@dataclass(frozen=True)
class RunPlan:
    """One run of one point.

    key: unique in the scenario, and the run's directory below the root: test/point/iteration.
    num_steps: None where the upstream launcher decides.
    training_config: plain data of the training process's config file; empty for the upstream launcher.
    env, secret_env: variables of the job; the secret ones are handed over in the environment and never written.
    recipe_env: variables that upstream's recipe sets where neither `env` nor the job's environment does.
    extra_srun_args: the test's own, behind the system's.
    after_completion, after_start: tests that it waits for to end or to start. end_with: tests whose end ends it.
    array, array_index: the job array, by its directory below the root, that it may be submitted in; "" for none.
    is_pre_test: it checks a node before everything else.
    is_gate: of the pre_test hook: it runs before everything else, and nothing runs after it has failed.
    profiler: the words before the program that has it profiled.
    node_commands: run once on every node before the training starts, each without a shell; none may fail.
    preempt_time_s: seconds before the time limit at which Slurm sends SIGTERM.
    hang_timeout_s: how long it may run without a step.
    upstream: set if Megatron-Bridge's own launcher runs the point, None for the embedded loop.
    predicted: gpu, step_time_s, tflops_per_gpu, peak_memory_gib as estimated; None where the GPU is not known.
    whole_nodes_gpus: GPUs of its nodes, if its job takes them as a whole; None if it takes its ranks' only.
    search: set if its test is searched, which submits the points that it chooses, one after the other.
    """

    key: str
    test_id: str
    test_name: str
    label: str
    iteration: int
    coordinates: Mapping[str, Any]
    args: Mapping[str, Any]
    recipe: str
    num_nodes: int
    ranks_per_node: int
    num_steps: int | None
    warmup_steps: int
    training_config: Mapping[str, Any]
    definition: Mapping[str, Any]
    env: Mapping[str, str]
    secret_env: Mapping[str, str] = field(repr=False)
    recipe_env: Mapping[str, str] = field(default_factory=dict)
    time_limit: str | None = None
    time_limit_s: float | None = None
    nodes: tuple[str, ...] = ()
    exclude_nodes: tuple[str, ...] = ()
    extra_srun_args: str = ""
    container_image: str = ""
    container_mounts: tuple[str, ...] = ()
    after_completion: tuple[str, ...] = ()
    after_start: tuple[str, ...] = ()
    end_with: tuple[str, ...] = ()
    array: str = ""
    array_index: int = 0
    is_pre_test: bool = False
    is_gate: bool = False
    profiler: tuple[str, ...] = ()
    node_commands: tuple[str, ...] = ()
    preempt_time_s: int | None = None
    hang_timeout_s: float | None = None
    upstream: UpstreamPlan | None = None
    predicted: Mapping[str, Any] | None = None
    whole_nodes_gpus: int | None = None
    search: SearchPlan | None = None

    @property
    def launcher(self) -> RunLauncher:
        return launcher_of(self.upstream)

    @property
    def of_launcher(self) -> UpstreamPlan:
        """The plan for Megatron-Bridge's launcher, of a run that has one."""
        assert self.upstream is not None
        return self.upstream

    @property
    def goes_first(self) -> bool:
        return self.is_pre_test or self.is_gate

    @property
    def is_again(self) -> bool:
        """Whether it is submitted only if a search requests it, to measure its point again."""
        return self.search is not None and self.search.is_again

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def held_gpus(self) -> int:
        """GPUs that nobody else can use while it runs."""
        return self.whole_nodes_gpus or self.world_size


@dataclass(frozen=True)
class RejectedPoint:
    """A point that breaks a rule. It is reported, never submitted."""

    test_id: str
    test_name: str
    label: str
    coordinates: Mapping[str, Any]
    violations: tuple[Violation, ...]


SUCCEEDED_IN = "succeeded in "  # begins the reason for leaving out a point that another run has


@dataclass(frozen=True)
class LeftOut:
    """An accepted point that is not run, because it was not chosen. reason: such as "does not match --only tp=2"."""

    test_id: str
    label: str
    reason: str

    @property
    def name(self) -> str:
        return f"{self.test_id}/{self.label}"

    @property
    def has_succeeded(self) -> bool:
        """Whether it was left out because it succeeded in another run."""
        return self.reason.startswith(SUCCEEDED_IN)


@dataclass(frozen=True)
class ScenarioPlan:
    """Everything that a scenario asks for, in order.

    tests: without those of which no point was chosen. left_out: points that were not chosen.
    rejected: rows of at most the first thousand rejected points of a test; num_rejected and rule_counts (points per
    broken rule) are over all. notes: what a limit of a sweep left out. dry_run: only its files were wanted.
    repository: commit of the checkout that has the scenario, and whether it is dirty; None outside of one.
    options: of `mbridge run`, which name the same files again; () if unknown.
    """

    scenario: str
    system: str
    runs: tuple[RunPlan, ...]
    rejected: tuple[RejectedPoint, ...]
    num_rejected: int = 0
    rule_counts: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    dry_run: bool = False
    repository: Mapping[str, Any] | None = None
    options: tuple[str, ...] = ()
    runner: RunnerConfig = field(default_factory=RunnerConfig)
