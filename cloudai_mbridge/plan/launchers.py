"""Launchers of points. Each run has one, chosen once; all differences between launchers are here."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cloudai_mbridge.errors import BadInput, counted
from cloudai_mbridge.files.run_files import POINT_FILES
from cloudai_mbridge.megatron_bridge.launcher.command_line import unknown_options
from cloudai_mbridge.megatron_bridge.launcher.plan import graph_note, is_passed, plan_upstream, refuse_upstream
from cloudai_mbridge.megatron_bridge.presets.environment import gpu_label, recipe_environment
from cloudai_mbridge.megatron_bridge.presets.find import Preset
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.loading.load import LoadedTest
from cloudai_mbridge.models.scenario import RunnerConfig, TestRun
from cloudai_mbridge.models.system import System, slurm_of
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.plan.effects import NOT_EMBEDDED, not_upstream, set_without_effect
from cloudai_mbridge.plan.process import mounts_of, node_commands_of, profiler_of, variables_of
from cloudai_mbridge.recipes import Recipe
from cloudai_mbridge.recipes.apply import core_release, lacking, training_config
from cloudai_mbridge.recipes.launcher_arguments import DETERMINISTIC
from cloudai_mbridge.recipes.step_lines import refuse_hidden_steps
from cloudai_mbridge.sweep.expand import SweepPoint

if TYPE_CHECKING:
    from cloudai_mbridge.plan.run_plan import RunPlan

_EXCLUDE = "exclude="


class RunLauncher:
    """A launcher, without a setting or a limit of its own.

    name: as the argument `launcher` has it.
    log_name, config_name: files of a run, with its steps and its training configuration; "" for none.
    has_records: the log contains a record of every step, with its loss.
    has_script: a script of ours is the job: a task of an array, the job of an executor, or a check of one node.
    max_parallel: runs at a time unless the scenario limits them; None for no limit.
    always_shown: arguments in plans and reports, whoever set them.
    """

    name: Launcher
    log_name: str
    config_name: str = ""
    has_records: bool = False
    has_script: bool = False
    max_parallel: int | None = None
    always_shown: frozenset[str] = frozenset({"num_gpus"})

    def refusals(self, test: LoadedTest, system: System) -> Iterator[str]:
        """Yield a line for every setting that the launcher needs and the files lack."""
        raise NotImplementedError

    def notes_on_system(self, system: System) -> Iterator[str]:
        """Yield a line for the keys of a system that do not reach the launcher."""
        yield from ()

    def notes_on_test(self, where: str, definition: TestDefinition) -> Iterator[str]:
        """Yield a line for the keys of a test that do not reach the launcher."""
        yield from ()

    def notes_on_run(self, point: SweepPoint, run: "RunPlan") -> Iterator[str]:
        """Yield a line for the settings of a point that do not reach the launcher."""
        yield from ()

    def shell_args(self, definition: TestDefinition) -> dict[str, Any]:
        """Return the arguments that a shell sees."""
        return {}

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
        return {}

    def mounts(self, args: ResolvedCmdArgs) -> tuple[str, ...]:
        """Return the mounts that arguments need."""
        return ()

    def recipe_variables(self, args: ResolvedCmdArgs, system: System, preset: Preset | None) -> dict[str, str]:
        """Return the variables that the recipe sets where neither files nor the job's environment do."""
        return {}

    def training(
        self, test: LoadedTest, args: ResolvedCmdArgs, recipe: Recipe | None, system: System | None
    ) -> dict[str, Any]:
        """Return the training configuration, {} if the launcher makes it; BadInput: it is invalid."""
        return {}

    def fields(self, test: LoadedTest, args: ResolvedCmdArgs, system: System) -> dict[str, Any]:
        """Return the fields of a `RunPlan` that only this launcher reads."""
        raise NotImplementedError

    def problems(self, run: "RunPlan", system: System) -> Iterator[str]:
        """Yield a line for every option or value that the launcher lacks."""
        yield from ()

    def avoiding(self, run: "RunPlan", nodes: Iterable[str]) -> "RunPlan":
        """Return a run whose job avoids nodes that the runner excludes, if the launcher does not read these."""
        return run


class EmbeddedLoop(RunLauncher):
    """The training program of this package."""

    name = Launcher.EMBEDDED
    log_name, config_name = POINT_FILES.stdout, POINT_FILES.training_config
    has_records = has_script = True
    always_shown = frozenset({"num_gpus", "max_steps", "compute_dtype"})

    def refusals(self, test: LoadedTest, system: System) -> Iterator[str]:
        if not test.definition.cmd_args.model_recipe_name:  # type: ignore[attr-defined]
            yield f"test {test.run.id!r}: cmd_args.model_recipe_name is missing; name a recipe (see `mbridge list`)"

    def notes_on_test(self, where: str, definition: TestDefinition) -> Iterator[str]:
        if names := set_without_effect(definition, NOT_EMBEDDED):
            yield f"{where}: {', '.join(names)}: the embedded loop needs no repository; `mbridge install` installs them"

    def variables(self, args: ResolvedCmdArgs, system: System) -> dict[str, str]:
        return variables_of(args, gpu_label(args, system))

    def mounts(self, args: ResolvedCmdArgs) -> tuple[str, ...]:
        return mounts_of(args)

    def recipe_variables(self, args: ResolvedCmdArgs, system: System, preset: Preset | None) -> dict[str, str]:
        found = recipe_environment(args, gpu_label(args, system), preset)
        return found | (DETERMINISTIC if args.deterministic else {})

    def training(
        self, test: LoadedTest, args: ResolvedCmdArgs, recipe: Recipe | None, system: System | None
    ) -> dict[str, Any]:
        assert recipe is not None  # the embedded loop's recipes exist, or the point was not planned
        return training_config(recipe, args, test.definition.extra_cmd_args, core_release(system), lacking(system))

    def fields(self, test: LoadedTest, args: ResolvedCmdArgs, system: System) -> dict[str, Any]:
        return {
            "profiler": profiler_of(test.definition.nsys, args),
            "node_commands": node_commands_of(args),
            "preempt_time_s": args.preempt_time,
        }


class BridgeLauncher(RunLauncher):
    """Megatron-Bridge's own launcher. Every run keeps a process on this machine until its job has ended."""

    name = Launcher.MEGATRON_BRIDGE
    log_name = POINT_FILES.launcher_log
    max_parallel = 32

    def refusals(self, test: LoadedTest, system: System) -> Iterator[str]:
        return refuse_upstream(test, system)

    def notes_on_system(self, system: System) -> Iterator[str]:
        return not_upstream(system)

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

    def shell_args(self, definition: TestDefinition) -> dict[str, Any]:
        return definition.cmd_args.model_dump(mode="json")

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

    def fields(self, test: LoadedTest, args: ResolvedCmdArgs, system: System) -> dict[str, Any]:
        return {"upstream": plan_upstream(test, args, system)}

    def problems(self, run: "RunPlan", system: System) -> Iterator[str]:
        return unknown_options(run, slurm_of(system))

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
