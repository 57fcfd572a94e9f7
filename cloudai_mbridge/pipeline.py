"""The main path: plan, write, run, report. A dry run is the same path, stopped after the files are written.

A written run can be continued: `resume` reads it back, and proceeds as if nothing had happened.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cloudai_mbridge.constraints import RuleSet
from cloudai_mbridge.files.run_index import record_run
from cloudai_mbridge.launch import write_plan, write_runs
from cloudai_mbridge.launch.write import create_root, refuse_output_dir
from cloudai_mbridge.megatron_bridge.launcher.command_line import refuse_unknown_options
from cloudai_mbridge.models.loading.load import Warn, load_scenario, load_system
from cloudai_mbridge.models.loading.loaded import HookOptions, LoadedScenario
from cloudai_mbridge.models.system import Executor, LocalSystem, System
from cloudai_mbridge.plan import ROOT_FILES, ScenarioPlan
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.plan.inputs import check_inputs
from cloudai_mbridge.plan.read import read_plan
from cloudai_mbridge.schedulers.slurm.client import node_states
from cloudai_mbridge.training.process.provenance import git_state_of

# Planning starts without the modules that only running needs: they are imported at their use
if TYPE_CHECKING:
    from cloudai_mbridge.report import RunReport
    from cloudai_mbridge.report.write import FindHistory
    from cloudai_mbridge.runner import Observer
    from cloudai_mbridge.runner.search import Chooser
    from cloudai_mbridge.schedulers.interface import Scheduler

# Every run of the upstream launcher keeps a process on this machine until its job has ended.
MOST_LAUNCHERS = 32
_NOT_ASKED = (
    "Slurm did not report whether it manages GPUs (GRES); the scripts assume so"
    " (if not, set supports_gpu_directives_cache = false)"
)


@dataclass(frozen=True)
class Request:
    """A scenario on a system, as the command line names them; `on_unknown_arg` and `hooks` as in `load_scenario`.

    rules: as in `build_plan`.
    """

    system_config: Path
    test_scenario: Path
    tests_dir: Path | None
    output_dir: Path | None
    on_unknown_arg: Warn | None = None
    hooks: HookOptions | None = None
    rules: RuleSet = RuleSet.RELEASE


@dataclass(frozen=True)
class Prepared:
    """A plan on its system. Nothing has been written or submitted."""

    plan: ScenarioPlan
    system: System
    output_dir: Path


@dataclass(frozen=True)
class Loaded:
    """A scenario with its tests, and the system to run it on, as their files say. request: what named these."""

    scenario: LoadedScenario
    system: System
    request: Request


def load(request: Request) -> Loaded:
    """Read and check the files of a scenario and a system. BadInput: one of them is wrong."""
    system = load_system(request.system_config)
    scenario = load_scenario(request.test_scenario, request.tests_dir, request.on_unknown_arg, request.hooks)
    return Loaded(scenario, system, request)


def plan(request: Request, runner: Mapping[str, Any] | None = None) -> Prepared:
    """Load everything and decide about every point; `runner` replaces keys of the scenario's [runner]."""
    return plan_loaded(load(request), runner)


def plan_loaded(loaded: Loaded, runner: Mapping[str, Any] | None = None) -> Prepared:
    """Decide about every point of a loaded scenario; `runner` as above."""
    request, (system, note) = loaded.request, _with_gpu_support(loaded.system)
    planned = build_plan(loaded.scenario, system, node_states, request.rules)
    refuse_unknown_options(planned.runs, system)
    output_dir = request.output_dir or Path(system.output_path)
    tests = (*loaded.scenario.pre_hook, *loaded.scenario.tests, *loaded.scenario.post_hook)
    unknown = check_inputs(planned.runs, system, output_dir, {test.run.id: test.path for test in tests})
    runner_config = planned.runner.model_copy(update=dict(runner or {}))
    repository = git_state_of(request.test_scenario)
    planned = replace(planned, runner=runner_config, notes=(*planned.notes, *note, *unknown), repository=repository)
    return Prepared(planned, system, output_dir)


def _with_gpu_support(system: System) -> tuple[System, tuple[str, ...]]:
    """Return the system with Slurm's support of GPUs as GRES, and a note if Slurm does not answer."""
    if isinstance(system, LocalSystem) or system.gpus_per_node is None:
        return system, ()
    if system.supports_gpu_directives_cache is not None:
        return system, ()
    from cloudai_mbridge.schedulers.slurm import has_gpu_gres

    if (answer := has_gpu_gres()) is None:
        return system, (f"system {system.name!r}: {_NOT_ASKED}",)
    return system.model_copy(update={"supports_gpu_directives_cache": answer}), ()


def preflight(prepared: Prepared) -> None:
    """Check, before anything is written, whether the system would take the runs."""
    refuse_output_dir(prepared.output_dir, prepared.system)
    if prepared.plan.runs:
        scheduler_for(prepared.system, prepared.plan).preflight()


def check_limits(prepared: Prepared) -> tuple[str, ...]:
    """Return a line for each limit of the cluster. BadInput: a run exceeds one of them."""
    if isinstance(prepared.system, LocalSystem) or not prepared.plan.runs:
        return ()
    from cloudai_mbridge.schedulers.slurm.limits import check_limits as of_slurm
    from cloudai_mbridge.schedulers.slurm.output_path import judge_output_path

    return (*of_slurm(prepared.system, prepared.plan.runs), judge_output_path(prepared.output_dir))


def write(prepared: Prepared, *, dry_run: bool = False) -> Path:
    """Write everything that a run submits into a new directory and return it. A dry run ends here, marked as one."""
    refuse_output_dir(prepared.output_dir, prepared.system)
    root = create_root(prepared.output_dir, prepared.plan.scenario, datetime.now(UTC))
    prepared = replace(prepared, plan=replace(prepared.plan, dry_run=dry_run))
    write_into(prepared, root)
    record_run(root)
    return root


def write_into(prepared: Prepared, root: Path) -> None:
    """Write everything that a run submits into a directory that exists; the plan comes last."""
    write_runs(prepared.plan, prepared.system, root)
    if prepared.system.executor is Executor.NEMO_RUN:
        from cloudai_mbridge.integrations import nemo_run

        nemo_run.write_scripts(prepared.plan, prepared.system, root)
    write_plan(prepared.plan, root)


def read(root: Path, *, needs_secrets: bool = True) -> Prepared:
    """Read back the files of `write`, to continue the run."""
    return Prepared(read_plan(root, needs_secrets=needs_secrets), load_system(root / ROOT_FILES.system), root.parent)


def execute(
    prepared: Prepared,
    root: Path,
    observer: "Observer",
    *,
    only_cancel: bool = False,
    choosers: "Mapping[str, Chooser]" = MappingProxyType({}),
) -> None:
    """Submit a written run, or continue after another process has stopped, and watch it to its end.

    choosers: of the tests to search, by id; of other tests every run is submitted.
    The caller holds the directory's `driver_lock`, and keeps it until the report is written.
    """
    from cloudai_mbridge.report import judge_in
    from cloudai_mbridge.runner import Pace, run_all

    system = prepared.system
    # polling processes costs a few milliseconds; polling Slurm is work for its controller
    shortest, longest, share = (0.1, 1.0, 0.02) if isinstance(system, LocalSystem) else (1.0, 30.0, 0.1)
    run_all(
        with_defaults(prepared),
        root,
        scheduler_for(system, prepared.plan),
        observer,
        judge_in(root),
        pace=Pace(shortest, system.monitor_interval or longest, share=share),
        only_cancel=only_cancel,
        has_lock=True,
        choosers=choosers,
        may_be_late=not isinstance(system, LocalSystem),
    )


def report(root: Path, **options: "FindHistory") -> "RunReport":
    """Judge the files in a run's directory and write the reports; `options` are the options of `write_report`.

    No other process holds the directory: the caller has `driver_lock`, or `no_driver`.

    BadInput: the directory contains nothing to report, or cannot be read; nothing was written.
    """
    from cloudai_mbridge.report import build_report, write_report

    result = build_report(root)
    write_report(result, root, **options)
    return result


def scheduler_for(system: System, plan: ScenarioPlan) -> "Scheduler":
    """Return the scheduler of a plan on a system: one per launcher, if the plan has runs of both."""
    if isinstance(system, LocalSystem):
        return _embedded(system, plan)
    from cloudai_mbridge.schedulers.megatron_bridge import UpstreamClient
    from cloudai_mbridge.schedulers.route import ByLauncher

    launchers = {run.upstream is not None for run in plan.runs}
    if launchers == {True}:
        return UpstreamClient(system, plan.runs)
    embedded = _embedded(system, plan)
    return ByLauncher(embedded, UpstreamClient(system, plan.runs)) if True in launchers else embedded


def _embedded(system: System, plan: ScenarioPlan) -> "Scheduler":
    """Return the scheduler of the embedded loop on a system."""
    from cloudai_mbridge.integrations.nemo_run import NemoRunLocalClient, NemoRunSlurmClient
    from cloudai_mbridge.schedulers.local import LocalClient
    from cloudai_mbridge.schedulers.slurm import SlurmClient

    uses_nemo_run = system.executor is Executor.NEMO_RUN
    if isinstance(system, LocalSystem):
        return (NemoRunLocalClient if uses_nemo_run else LocalClient)(system, plan.runs)
    return (NemoRunSlurmClient if uses_nemo_run else SlurmClient)(system)


def with_defaults(prepared: Prepared) -> ScenarioPlan:
    """Return the plan with the system's limits: one run at a time here; on a cluster, the queueing is Slurm's."""
    config, limit = prepared.plan.runner, None
    if isinstance(prepared.system, LocalSystem):
        limit = 1
    elif any(run.upstream is not None for run in prepared.plan.runs):
        limit = MOST_LAUNCHERS
    limited = config if config.max_parallel else config.model_copy(update={"max_parallel": limit})
    return replace(prepared.plan, runner=limited)
