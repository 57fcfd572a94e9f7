"""Launchers of points. Each run has one, chosen once; all differences between launchers are here.

Environment of the embedded loop as in Megatron-Bridge 0.6.0, scripts/performance/setup_experiment.py, perf_plugins.py
and utils/executors.py.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from cloudai_mbridge.constraints.stack import refuse_unknown_settings, stack_at
from cloudai_mbridge.errors import BadInput, counted
from cloudai_mbridge.files.run_files import POINT_FILES
from cloudai_mbridge.megatron_bridge.environment import gpu_label, recipe_environment
from cloudai_mbridge.megatron_bridge.launcher_plan import graph_note, is_passed, plan_upstream, refuse_upstream
from cloudai_mbridge.megatron_bridge.presets import Preset
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs, names_in
from cloudai_mbridge.models.loading import LoadedTest
from cloudai_mbridge.models.scenario import RunnerConfig, TestRun, TestScenario
from cloudai_mbridge.models.system import Executor, LocalSystem, Partition, SlurmSystem, System, slurm_of
from cloudai_mbridge.models.test_definition import GitRepo, NsysConfiguration, TestDefinition, TrainingReportConfig
from cloudai_mbridge.plan.launcher_command import interpreted_words, unknown_options
from cloudai_mbridge.recipes import Recipe
from cloudai_mbridge.recipes.apply import core_release, lacking, refuse_hidden_steps, training_config
from cloudai_mbridge.recipes.arguments import DETERMINISTIC
from cloudai_mbridge.sweep.expand import SweepPoint
from cloudai_mbridge.training.startup.variables import BINDING, DUMP

if TYPE_CHECKING:
    from cloudai_mbridge.plan.run_plan import RunPlan

# Keys of CloudAI's files that nothing here reads
NO_EFFECT: Mapping[type[BaseModel], tuple[str, ...]] = {
    LocalSystem: ("hf_home_path", "data_repository", "reports"),
    SlurmSystem: (
        *("hf_home_path", "data_repository", "reports", "cache_docker_images_locally", "status_retry_pause_seconds"),
        *("group_allocated", "ntasks_per_node"),
    ),
    Partition: ("slurm_nodes",),
    TestScenario: ("job_status_check", "sol_path", "reports"),
    TestRun: ("weight", "sol", "ideal_perf"),
    TestDefinition: ("predictor", "agent_metrics", "agent_reward_function", "agent_config"),
    TrainingReportConfig: ("exclude_post_profiling_steps",),
    GitRepo: ("installed_path",),
}
# Keys of a system that act on the embedded loop alone: Megatron-Bridge's launcher has no option for them
NOT_UPSTREAM = ("python_executable", "distribution", "mpi", "container_mount_home", "job_name_prefix", "executor")
# Keys of a test that act on Megatron-Bridge's launcher alone
NOT_EMBEDDED = ("git_repos", "nemo_run_repo")
# Extent and time of profiling as in upstream's launcher and NeMo-Run; CUPTI's hardware tracing does not work there
_NSYS = {"sample": "none", "trace": "cuda-sw,nvtx", "force_overwrite": True, "cuda_graph_trace": "node"}
_NSYS |= {"capture_range": "cudaProfilerApi", "capture_range_end": "stop"}
_NSYS_ARGS, _SQLITE = ["--cuda-event-trace=false"], "--export=sqlite"
_LEAST_NUMA_GPUS = ("gb200", "gb300", "vr200")  # two GPUs to a NUMA node, else four
# On B300 every rank has two cores of its own, except in these model families
_SHARED_CORES = {"llama", "kimi"}
_EXCLUDE = "exclude="


def set_without_effect(model: BaseModel, names: Collection[str] | None = None) -> list[str]:
    """Return the keys of a table that are set, to something, of those without effect, or of `names`."""
    names = NO_EFFECT.get(type(model), ()) if names is None else names
    return [name for name in names if name in model.model_fields_set and getattr(model, name) not in (None, [], {})]


def notes_on_keys(where: str, model: BaseModel) -> Iterator[str]:
    """Yield one line for all keys of a table that are set and have no effect."""
    if names := set_without_effect(model):
        verb = "has" if len(names) == 1 else "have"
        yield f"{where}: {', '.join(names)} {verb} no effect"


def variables_of(args: ResolvedCmdArgs, gpu: str) -> dict[str, str]:
    """Return the variables that arguments set. gpu: as `gpu_label` returns it."""
    found = {"NEMO_HOME": args.nemo_home, "HF_HUB_OFFLINE": "1" if args.offline else None}
    found |= {DUMP: "1" if args.dump_env else None}
    found |= {BINDING: _binding(args, gpu) if args.enable_pct_binding else None}
    return {name: value for name, value in found.items() if value}


def _binding(args: ResolvedCmdArgs, gpu: str) -> str:
    """Return how many ranks share a NUMA node, and how many cores each has of its own, as N or N,CORES."""
    ranks = 2 if gpu in _LEAST_NUMA_GPUS else 4
    if args.task == "pretrain" and args.model_family_name in _SHARED_CORES:
        shares_cores = True
    elif args.model_recipe_name == "deepseek_v3":
        shares_cores = args.config_variant != "large_scale"
    else:
        shares_cores = args.model_recipe_name == "nemotron_3_super" and args.compute_dtype == "bf16"
    return f"{ranks},2" if gpu == "b300" and not shares_cores else str(ranks)


def profiler_of(table: NsysConfiguration | None, args: ResolvedCmdArgs) -> tuple[str, ...]:
    """Return the words before the program that has it profiled: of the [nsys] table, and of the arguments."""
    if table is not None and not table.enable:
        table = None
    if not args.enable_nsys:
        return () if table is None else table.command
    own: dict[str, object] = {} if table is None else table.model_dump(exclude_unset=True)
    values: dict[str, object] = {**_NSYS, **own}
    if trace := names_in(args.nsys_trace):
        values["trace"] = ",".join(trace)
    if args.profiling_gpu_metrics:
        values["gpu_metrics_devices"] = "all"
    given = args.nsys_extra_args
    texts = given.split(",") if isinstance(given, str) else given or ()
    more = [word for text in texts if (word := text.strip())]
    exported = [word.partition("=")[2] for word in more if word.startswith("--export=")]
    exported += [after for word, after in pairwise(more) if word == "--export"]
    if args.export_nsys_sqlite and not any("sqlite" in value.split(",") for value in exported):
        more.append(_SQLITE)
    values["extra_args"] = [*more, *_NSYS_ARGS, *(table.extra_args if table else ())]
    return NsysConfiguration.model_validate(values).command


def node_commands_of(args: ResolvedCmdArgs) -> tuple[str, ...]:
    """Return the commands that set the clocks of a node's GPUs. They last beyond the job, as upstream's do."""
    clocks: Mapping[str, object] = {
        "boost-slider --vboost 1": args.enable_vboost,
        f"-lgc {args.lock_gpu_freq}": args.lock_gpu_freq is not None,
        f"-lmc {args.peak_mem_clk},{args.peak_mem_clk}": args.peak_mem_clk not in (None, -1),
    }
    return tuple(f"sudo nvidia-smi {options}" for options, is_set in clocks.items() if is_set)


class EmbeddedLoop:
    """The training program of this package. Megatron-Bridge's launcher has the same fields and methods.

    name: as the argument `launcher` has it.
    log_name, config_name: files of a run, with its steps and its training configuration; "" for none.
    has_records: the log contains a record of every step, with its loss.
    has_script: a script of ours is the job: a task of an array, the job of an executor, or a check of one node.
    pastes_words: its words stand unquoted in scripts of the job, which is always in a container.
    max_parallel: runs at a time unless the scenario limits them; None for no limit.
    always_shown: arguments in plans and reports, whoever set them.
    """

    name = Launcher.EMBEDDED
    log_name, config_name = POINT_FILES.stdout, POINT_FILES.training_config
    has_records = has_script = True
    pastes_words = False
    max_parallel: int | None = None
    always_shown = frozenset({"num_gpus", "max_steps", "compute_dtype"})

    def refusals(self, test: LoadedTest, system: System) -> Iterator[str]:
        """Yield a line for every setting that the launcher needs and the files lack."""
        if not test.definition.cmd_args.model_recipe_name:  # type: ignore[attr-defined]
            yield f"test {test.run.id!r}: cmd_args.model_recipe_name is missing; name a recipe (see `mbridge list`)"

    def notes_on_system(self, system: System) -> Iterator[str]:
        """Yield a line for the keys of a system that do not reach the launcher."""
        yield from ()

    def notes_on_test(self, where: str, definition: TestDefinition) -> Iterator[str]:
        """Yield a line for the keys of a test that do not reach the launcher."""
        if names := set_without_effect(definition, NOT_EMBEDDED):
            yield f"{where}: {', '.join(names)}: the embedded loop needs no repository; `mbridge install` installs them"

    def notes_on_run(self, point: SweepPoint, run: "RunPlan") -> Iterator[str]:
        """Yield a line for the settings of a point that do not reach the launcher."""
        yield from ()

    def arguments(self, point: SweepPoint, resolved: ResolvedCmdArgs) -> ResolvedCmdArgs:
        """Return the arguments that the launcher gets. resolved: the point's, with those of recipe and preset."""
        return resolved

    def num_nodes(self, point: SweepPoint) -> int | None:
        """Return the number of nodes that a point asks for; None for as few as hold the GPUs."""
        return point.num_nodes

    def knows_steps(self, args: ResolvedCmdArgs, run: TestRun) -> bool:
        """Return whether max_steps is the number of steps; else the launcher decides."""
        return True

    def hang_timeout_s(self, runner: RunnerConfig) -> float | None:
        """Return how long a run may go without a step."""
        return runner.hang_timeout_s

    def variables(self, args: ResolvedCmdArgs, system: System) -> dict[str, str]:
        """Return the variables that arguments set."""
        return variables_of(args, gpu_label(args, system))

    def mounts(self, args: ResolvedCmdArgs) -> tuple[str, ...]:
        """Return the mounts that arguments need."""
        return (f"{args.nemo_home}:{args.nemo_home}",) if args.nemo_home else ()

    def recipe_variables(self, args: ResolvedCmdArgs, system: System, preset: Preset | None) -> dict[str, str]:
        """Return the variables that the recipe sets where neither files nor the job's environment do."""
        found = recipe_environment(args, gpu_label(args, system), preset)
        return found | (DETERMINISTIC if args.deterministic else {})

    def training(
        self, test: LoadedTest, args: ResolvedCmdArgs, recipe: Recipe | None, system: System | None
    ) -> dict[str, Any]:
        """Return the training configuration, {} if the launcher makes it; BadInput: it is invalid."""
        assert recipe is not None  # the embedded loop's recipes exist, or the point was not planned
        extra, core = test.definition.extra_cmd_args, core_release(system)
        data = training_config(recipe, args, extra, core, lacking(system))
        if extra and core is None and system is not None:  # of recipe and preset, rule E14 says it
            variables = {**system.global_env_vars, **test.definition.extra_env_vars}
            refuse_unknown_settings(data, stack_at(system, args, variables.get))
        return data

    def fields(self, test: LoadedTest, args: ResolvedCmdArgs, system: System) -> dict[str, Any]:
        """Return the fields of a `RunPlan` that only this launcher reads."""
        return {
            "profiler": profiler_of(test.definition.nsys, args),
            "node_commands": node_commands_of(args),
            "preempt_time_s": args.preempt_time,
        }

    def problems(self, run: "RunPlan", system: System) -> Iterator[str]:
        """Yield a line for every option or value that the launcher lacks."""
        yield from ()

    def avoiding(self, run: "RunPlan", nodes: Iterable[str]) -> "RunPlan":
        """Return a run whose job avoids nodes that the runner excludes, if the launcher does not read these."""
        return run


class BridgeLauncher:
    """Megatron-Bridge's own launcher. Every run keeps a process on this machine until its job has ended."""

    name = Launcher.MEGATRON_BRIDGE
    log_name, config_name = POINT_FILES.launcher_log, ""
    has_records = has_script = False
    pastes_words = True
    max_parallel = 32
    always_shown = frozenset({"num_gpus"})

    def refusals(self, test: LoadedTest, system: System) -> Iterator[str]:
        return refuse_upstream(test, system)

    def notes_on_system(self, system: System) -> Iterator[str]:
        given = [name for name in NOT_UPSTREAM if name in system.model_fields_set]
        if names := [name for name in given if getattr(system, name) not in (None, "", False, Executor.MBRIDGE)]:
            verb = "does" if len(names) == 1 else "do"
            what = f"{', '.join(names)} {verb} not reach the upstream launcher, which has no such option"
            yield f"system {system.name!r}: {what}"

    def notes_on_test(self, where: str, definition: TestDefinition) -> Iterator[str]:
        if definition.nsys is not None and definition.nsys.enable:
            yield f"{where}: [nsys] does not reach the upstream launcher, as in CloudAI; use cmd_args.enable_nsys"

    def notes_on_run(self, point: SweepPoint, run: "RunPlan") -> Iterator[str]:
        if point.num_nodes not in (None, run.num_nodes):
            yield (
                f"the upstream launcher takes {counted(run.num_nodes, 'node')} for {counted(run.world_size, 'GPU')};"
                f" num_nodes = {point.num_nodes} does not reach it"
            )
        if note := graph_note(point.args):
            yield note

    def arguments(self, point: SweepPoint, resolved: ResolvedCmdArgs) -> ResolvedCmdArgs:
        """Return the point's alone: the launcher has recipes of its own, whose defaults are unknown here."""
        return point.args

    def num_nodes(self, point: SweepPoint) -> int | None:
        """Return None: the launcher takes the fewest nodes, whatever the scenario asks for."""
        return None

    def knows_steps(self, args: ResolvedCmdArgs, run: TestRun) -> bool:
        return is_passed("max_steps", args, run)

    def hang_timeout_s(self, runner: RunnerConfig) -> float | None:
        """Return the time only if the scenario sets it: the log may contain no steps."""
        return runner.hang_timeout_s if "hang_timeout_s" in runner.model_fields_set else None

    def variables(self, args: ResolvedCmdArgs, system: System) -> dict[str, str]:
        return {}

    def mounts(self, args: ResolvedCmdArgs) -> tuple[str, ...]:
        return ()

    def recipe_variables(self, args: ResolvedCmdArgs, system: System, preset: Preset | None) -> dict[str, str]:
        return {}

    def training(
        self, test: LoadedTest, args: ResolvedCmdArgs, recipe: Recipe | None, system: System | None
    ) -> dict[str, Any]:
        return {}

    def fields(self, test: LoadedTest, args: ResolvedCmdArgs, system: System) -> dict[str, Any]:
        return {"upstream": plan_upstream(test, args, system)}

    def problems(self, run: "RunPlan", system: System) -> Iterator[str]:
        yield from unknown_options(run, slurm_of(system))
        yield from interpreted_words(run, slurm_of(system))

    def avoiding(self, run: "RunPlan", nodes: Iterable[str]) -> "RunPlan":
        """Add the nodes to the options of the job, unless the scenario names the nodes to use."""
        if run.nodes:
            return run
        params = run.of_launcher.slurm_params
        names = [param.removeprefix(_EXCLUDE) for param in params if param.startswith(_EXCLUDE)]
        others = tuple(param for param in params if not param.startswith(_EXCLUDE))
        if names := list(dict.fromkeys([*names, *nodes])):
            others = (*others, _EXCLUDE + ",".join(names))
        return replace(run, upstream=replace(run.of_launcher, slurm_params=others))


RunLauncher = EmbeddedLoop | BridgeLauncher
EMBEDDED, MEGATRON_BRIDGE = EmbeddedLoop(), BridgeLauncher()
LAUNCHERS: Mapping[str, RunLauncher] = {EMBEDDED.name: EMBEDDED, MEGATRON_BRIDGE.name: MEGATRON_BRIDGE}


def launcher_of(upstream: object) -> RunLauncher:
    """Return the launcher of a planned run. upstream: of the run, as an object or from plan.json; None if absent."""
    return EMBEDDED if upstream is None else MEGATRON_BRIDGE


def launchers_of(definition: TestDefinition) -> list[RunLauncher]:
    """Return the launchers of a test's points, Megatron-Bridge's first: it needs more of a test."""
    given = definition.cmd_args.launcher  # type: ignore[attr-defined]
    names = given if isinstance(given, list) else [given]
    return [launcher for launcher in (MEGATRON_BRIDGE, EMBEDDED) if launcher.name in names]


def refuse_unknown_options(runs: Iterable["RunPlan"], system: System) -> None:
    """Raise BadInput with one line for every option or value that a run's launcher lacks."""
    if lines := [line for run in runs for line in run.launcher.problems(run, system)]:
        raise BadInput("\n".join(dict.fromkeys(lines)))


def num_steps_of(test: LoadedTest, args: ResolvedCmdArgs) -> int | None:
    """Return the number of steps of a point, None if its launcher decides; BadInput for settings that hide steps."""
    launcher = LAUNCHERS[args.launcher]
    num_steps = args.max_steps if launcher.knows_steps(args, test.run) else None
    refuse_hidden_steps(test.definition.extra_cmd_args, num_steps, is_upstream=not launcher.has_records)
    return num_steps
