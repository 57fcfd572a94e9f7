"""The frozen decisions about one run, and the plan of a whole scenario."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cloudai_mbridge.constraints import Violation
from cloudai_mbridge.constraints.megatron_sizes import place
from cloudai_mbridge.constraints.rule import Point
from cloudai_mbridge.files.text import slug
from cloudai_mbridge.megatron_bridge.environment import gpu_label
from cloudai_mbridge.megatron_bridge.launcher_plan import HF_TOKEN, WANDB_API_KEY, UpstreamPlan
from cloudai_mbridge.megatron_bridge.presets import Preset
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.credentials import is_secret_variable
from cloudai_mbridge.models.loading import LoadedTest
from cloudai_mbridge.models.scenario import RunnerConfig
from cloudai_mbridge.models.shell import absolute_mount, expand
from cloudai_mbridge.models.slurm_values import parse_time_limit
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.plan.launchers import LAUNCHERS, RunLauncher, launcher_of, num_steps_of
from cloudai_mbridge.plan.profiling import profiled_steps, upstream_profiling
from cloudai_mbridge.plan.segments import segment_of
from cloudai_mbridge.recipes import Recipe
from cloudai_mbridge.sweep.expand import SweepPoint

# cmd_args that hold a credential -> the variable that hands it to the job
SECRET_VARIABLES = {"hf_token": HF_TOKEN, "wandb_key": WANDB_API_KEY}


@dataclass(frozen=True)
class SearchPlan:
    """Predictions about a point for a search.

    groups: seconds of a step's parts, as in `StepGroups`; () where nothing is predicted. memory_share: predicted peak
    over what the GPU has; None: not known. max_trials: points that the search may try; None: any number.
    is_again: the run repeats its point if the search wants to know it better. is_calibrated: the prediction was fitted
    to the cluster. is_guess: it is another GPU's, or of a GPU of which no published row is.
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
    profiled: the first and the last step that a profiler slows; None without a profiler.
    segment: nodes of the job that lie together in an NVLink domain; None where it asks for none.
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
    segment: int | None = None
    profiled: tuple[int, int] | None = None
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


def plan_run(
    test: LoadedTest,
    point: SweepPoint,
    args: ResolvedCmdArgs,
    recipe: Recipe | None,
    system: System,
    iteration: int,
    preset: Preset | None = None,
) -> RunPlan:
    """Place a point that breaks no rule, and name everything that it needs.

    args: the point's with the recipe's defaults. preset: the point's, if it has one.
    """
    run, definition, launcher = test.run, test.definition, LAUNCHERS[args.launcher]
    args = launcher.arguments(point, args)
    num_nodes, ranks_per_node = place(Point(args, system, recipe, launcher.num_nodes(point)))
    env = {name: str(value) for name, value in system.global_env_vars.items()} | dict(point.env)
    env = launcher.variables(args, system) | env
    time_limit = run.time_limit or args.time_limit
    num_steps = num_steps_of(test, args)
    config = launcher.training(test, args, recipe, system)
    custom = [mount for mount in (args.custom_mounts or "").split(",") if mount]
    mounts = (*definition.extra_container_mounts, *custom, *launcher.mounts(args))
    recipe_env = launcher.recipe_variables(args, system, preset)
    segment = segment_of(run, system, gpu_label(args, system), num_nodes)
    fields = launcher.fields(test, args, system)
    if segment is not None and (upstream := fields.get("upstream")) is not None:
        fields["upstream"] = replace(upstream, slurm_params=(*upstream.slurm_params, f"segment={segment}"))
    return RunPlan(
        key=f"{slug(run.id)}/{point.label}/{iteration}",
        test_id=run.id,
        test_name=definition.name,
        label=point.label,
        iteration=iteration,
        coordinates=point.coordinates,
        args=public_args(args),
        recipe=args.model_recipe_name,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        num_steps=num_steps,
        warmup_steps=definition.warmup_steps(num_steps),
        training_config=config,
        definition=resolved_definition(definition, point, args),
        env={name: value for name, value in env.items() if not is_secret_variable(name, value)},
        secret_env=_secrets(args, env),
        recipe_env={name: value for name, value in recipe_env.items() if name not in env},
        time_limit=time_limit,
        time_limit_s=parse_time_limit(time_limit),
        nodes=tuple(run.nodes),
        exclude_nodes=tuple(run.exclude_nodes),
        segment=segment,
        profiled=profiled_steps(config.get("profiling") or upstream_profiling(args, definition.extra_cmd_args)),
        extra_srun_args=run.extra_srun_args or "",
        container_image=args.container_image,
        container_mounts=tuple(absolute_mount(mount) for mount in mounts if mount.strip()),
        after_completion=_wait_for(run.dependencies, "start_post_comp"),
        after_start=_wait_for(run.dependencies, "start_post_init"),
        end_with=_wait_for(run.dependencies, "end_post_comp"),
        **fields,
    )


def _wait_for(dependencies: Iterable[Any], kind: str) -> tuple[str, ...]:
    return tuple(dependency.id for dependency in dependencies if dependency.type == kind)


def _secrets(args: ResolvedCmdArgs, env: dict[str, str]) -> dict[str, str]:
    """Return the values of credentials, with known variables expanded now: no script may contain them."""
    secrets = {name: value for name, value in env.items() if is_secret_variable(name, value)}
    for name, variable in SECRET_VARIABLES.items():
        if value := (getattr(args, name) or "").strip():
            secrets[variable] = value
    known = {**os.environ, **{name: value for name, value in env.items() if name not in secrets}}
    return {name: expand(value, known) for name, value in secrets.items()}


def public_args(args: ResolvedCmdArgs) -> dict[str, Any]:
    """Return the arguments set by user or recipe, without credentials, and the defaults that decide the training."""
    values = args.model_dump(mode="json", exclude_none=True)
    kept = args.model_fields_set | LAUNCHERS[args.launcher].always_shown
    return {name: value for name, value in values.items() if name in kept and name not in SECRET_VARIABLES}


def resolved_definition(definition: TestDefinition, point: SweepPoint, args: ResolvedCmdArgs) -> dict[str, Any]:
    """Return the point as a test definition of its own: no lists, no credentials."""
    env = {name: value for name, value in point.env.items() if not is_secret_variable(name, value)}
    agent = {"agent", "agent_steps", "agent_metrics", "agent_reward_function", "agent_config", "predictor"}
    left_out = {"extra_env_vars", "sweep", *agent}  # credentials; settings of searches only
    dump = definition.model_dump(mode="json", exclude_none=True, exclude_defaults=True, exclude=left_out)
    return {
        **dump,
        "name": f"{definition.name}-{point.label}",
        "test_template_name": definition.test_template_name,
        "cmd_args": public_args(args),
        **({"extra_env_vars": env} if env else {}),
    }
