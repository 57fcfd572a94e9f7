"""The main path: plan, write, run, report. A dry run is the same path, stopped after the files are written.

A written run can be continued: `resume` reads it back, and proceeds as if nothing had happened.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cloudai_mbridge.constraints import RuleSet
from cloudai_mbridge.errors import BadInput, Damaged
from cloudai_mbridge.files.run_files import record_run
from cloudai_mbridge.launch import write_plan, write_runs
from cloudai_mbridge.launch.script import REHEARSAL_LEVELS
from cloudai_mbridge.launch.write import create_root, refuse_output_dir
from cloudai_mbridge.models.loading import HOOK_DIR, LoadedScenario, Warn, load_scenario, load_system
from cloudai_mbridge.models.system import Executor, LocalSystem, System, slurm_of
from cloudai_mbridge.plan import ROOT_FILES, RunPlan, ScenarioPlan
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.plan.checks import check_inputs
from cloudai_mbridge.plan.launchers import EMBEDDED, MEGATRON_BRIDGE, RunLauncher, launcher_of, refuse_unknown_options
from cloudai_mbridge.plan.read import read_plan, read_plan_data, refuse_dry_run
from cloudai_mbridge.plan.select import Selection, hooks_of, listed
from cloudai_mbridge.schedulers.slurm.client import node_states
from cloudai_mbridge.training.process.provenance import git_state_of

# Planning starts without the modules that only running needs: they are imported at their use
if TYPE_CHECKING:
    from cloudai_mbridge.rehearsal import Rehearsal, Step
    from cloudai_mbridge.report import RunReport
    from cloudai_mbridge.report.write import FindHistory
    from cloudai_mbridge.runner import Observer
    from cloudai_mbridge.runner.context import Chooser
    from cloudai_mbridge.runner.control import RunStatus
    from cloudai_mbridge.runner.interrupt import Interrupts
    from cloudai_mbridge.runner.observe import Observed
    from cloudai_mbridge.schedulers.interface import Scheduler

_NOT_ASKED = (
    "Slurm did not report whether it manages GPUs (GRES); the scripts assume so"
    " (if not, set supports_gpu_directives_cache = false)"
)


@dataclass(frozen=True)
class Request:
    """A scenario on a system, as the command line names them; `on_unknown_arg` as in `load_scenario`.

    hook_dir: directory of hooks. skip_hooks: none of them run. rules: as in `build_plan`.
    only, failed_of: the points to run, as in `selection_of`.
    """

    system_config: Path
    test_scenario: Path
    tests_dir: Path | None
    output_dir: Path | None
    on_unknown_arg: Warn | None = None
    hook_dir: Path = HOOK_DIR
    skip_hooks: bool = False
    rules: RuleSet = RuleSet.RELEASE
    only: tuple[str, ...] = ()
    failed_of: Path | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Options of `mbridge run` for the same request, without those of its output."""
        given = (
            ("--system-config", str(self.system_config)),
            ("--tests-dir", str(self.tests_dir)) if self.tests_dir else (),
            ("--test-scenario", str(self.test_scenario)),
            ("--hook-dir", str(self.hook_dir)) if self.hook_dir != HOOK_DIR else (),
            ("--skip-hooks",) if self.skip_hooks else (),
            ("--rules", str(self.rules)) if self.rules is not RuleSet.RELEASE else (),
            ("--allow-unknown-args",) if self.on_unknown_arg else (),
        )
        return tuple(word for option in given for word in option)


@dataclass(frozen=True)
class Prepared:
    """A plan on its system. Nothing has been written or submitted. rehearsal: of its points, if there was one."""

    plan: ScenarioPlan
    system: System
    output_dir: Path
    rehearsal: "Rehearsal | None" = None


@dataclass(frozen=True)
class Loaded:
    """A scenario with its tests, and the system to run it on, as their files say. request: what named these."""

    scenario: LoadedScenario
    system: System
    request: Request


def load(request: Request) -> Loaded:
    """Read and check the files of a scenario and a system. BadInput: one of them is wrong."""
    system = load_system(request.system_config)
    hooks = None if request.skip_hooks else request.hook_dir
    scenario = load_scenario(request.test_scenario, request.tests_dir, request.on_unknown_arg, hooks)
    return Loaded(scenario, system, request)


def plan(request: Request, runner: Mapping[str, Any] | None = None) -> Prepared:
    """Load everything and decide about every point; `runner` replaces keys of the scenario's [runner]."""
    return plan_loaded(load(request), runner)


def plan_loaded(loaded: Loaded, runner: Mapping[str, Any] | None = None) -> Prepared:
    """Decide about every point of a loaded scenario; `runner` as above."""
    request, (system, note) = loaded.request, _with_gpu_support(loaded.system)
    selection = selection_of(request.only, request.failed_of)
    planned = build_plan(loaded.scenario, system, node_states, request.rules, selection)
    refuse_unknown_options(planned.runs, system)
    output_dir = request.output_dir or Path(system.output_path)
    tests = (*loaded.scenario.pre_hook, *loaded.scenario.tests, *loaded.scenario.post_hook)
    unknown = check_inputs(planned.runs, system, output_dir, {test.run.id: test.path for test in tests})
    runner_config = planned.runner.model_copy(update=dict(runner or {}))
    repository = git_state_of(request.test_scenario)
    notes = (*planned.notes, *note, *unknown)
    planned = replace(planned, runner=runner_config, notes=notes, repository=repository, options=request.options)
    return Prepared(planned, system, output_dir)


def selection_of(only: Sequence[str], failed_of: Path | None) -> Selection:
    """Return the points to run. only: expressions, of which one must match. failed_of: a run whose good points do not.

    InUse: a process holds that run. NothingRan: it is a dry run, or nothing was submitted.
    BadInput: not a run's directory, or active jobs.
    """
    if failed_of is None:
        return Selection(tuple(only))
    from cloudai_mbridge.report import build_report
    from cloudai_mbridge.runner.control import read_status
    from cloudai_mbridge.runner.lock import no_driver
    from cloudai_mbridge.verdict import Verdict

    root = Path(os.path.realpath(failed_of))
    plan = read_plan_data(root)
    refuse_dry_run(root, plan)
    with no_driver(root):
        ongoing = [run.key for run in read_status(root).runs if run.is_open and run.num_attempts]
        if ongoing:
            raise BadInput(f"{root}: {listed(ongoing)}: not ended; continue with: mbridge resume {root}")
        report = build_report(root)
    verdicts: dict[tuple[str, str], set[Verdict]] = {}
    coordinates = {}
    for point in report.points:
        if point.verdict is not Verdict.REJECTED and not point.is_pre_test:
            verdicts.setdefault((point.test_id, point.label), set()).add(point.verdict)
            coordinates[point.test_id, point.label] = point.coordinates
    good = {name for name, found in verdicts.items() if found == {Verdict.SUCCESS}}
    good |= {(point.test_id, point.label) for point in report.left_out if point.has_succeeded}
    hooks = hooks_of(plan["runs"])
    others = {name: coordinates[name] for name in verdicts if name not in good and name[0] not in hooks}
    return Selection(tuple(only), root.name, report.scenario, frozenset(good), others)


def _with_gpu_support(system: System) -> tuple[System, tuple[str, ...]]:
    """Return the system with Slurm's support of GPUs as GRES, and a note if Slurm does not answer."""
    if not system.may_support_gpus:
        return system, ()
    from cloudai_mbridge.schedulers.slurm import has_gpu_gres

    if (answer := has_gpu_gres()) is None:
        return system, (f"system {system.name!r}: {_NOT_ASKED}",)
    return system.model_copy(update={"supports_gpu_directives_cache": answer}), ()


def rehearse(
    prepared: Prepared,
    *,
    on_slurm: bool = False,
    level: str = REHEARSAL_LEVELS[0],
    progress: "Callable[[Step], None] | None" = None,
) -> "Rehearsal":
    """Build the distinct ranks of each accepted point without a GPU; as `rehearsal.rehearse`. Nothing is written."""
    from cloudai_mbridge.rehearsal import rehearse

    shown = progress or (lambda step: None)
    return rehearse(prepared.plan, prepared.system, prepared.output_dir, on_slurm=on_slurm, level=level, progress=shown)


def rehearsed(prepared: Prepared, rehearsal: "Rehearsal") -> Prepared:
    """Return a plan with its rehearsal, of which the refused points are rejected.

    BadInput: a check that comes before all points is refused: nothing could run.
    """
    from cloudai_mbridge.rehearsal.reject import without_refused

    planned = without_refused(prepared.plan, prepared.system, rehearsal)
    return replace(prepared, plan=planned, rehearsal=rehearsal)


def preflight(prepared: Prepared) -> None:
    """Check, before anything is written, whether the system would take the runs."""
    refuse_output_dir(prepared.output_dir, prepared.system, prepared.plan.runs)
    if prepared.plan.runs:
        scheduler_for(prepared.system, prepared.plan).preflight()


def check_limits(prepared: Prepared) -> tuple[str, ...]:
    """Return a line for each limit of the cluster. BadInput: a run exceeds one of them."""
    if prepared.system.is_one_machine or not prepared.plan.runs:
        return ()
    from cloudai_mbridge.schedulers.slurm.limits import check_limits as of_slurm
    from cloudai_mbridge.schedulers.slurm.limits import judge_output_path

    return (*of_slurm(slurm_of(prepared.system), prepared.plan.runs), judge_output_path(prepared.output_dir))


def write(prepared: Prepared, *, dry_run: bool = False) -> Path:
    """Write everything that a run submits into a new directory and return it. A dry run ends here, marked as one."""
    refuse_output_dir(prepared.output_dir, prepared.system, prepared.plan.runs)
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
    if prepared.rehearsal is not None:
        from cloudai_mbridge.rehearsal.record import write_rehearsal

        write_rehearsal(prepared.rehearsal, root)
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
    is_throttled: bool = False,
    choosers: "Mapping[str, Chooser]" = MappingProxyType({}),
    interrupts: "Interrupts | None" = None,
) -> None:
    """Submit a written run, or continue after another process has stopped, and watch it to its end.

    choosers: of the tests to search, by id; of other tests every run is submitted. is_throttled, interrupts: as in
    `run_all`.
    The caller holds the directory's `driver_lock`, and keeps it until the report is written.
    """
    from cloudai_mbridge.report import judge_in
    from cloudai_mbridge.runner import Pace, run_all

    system = prepared.system
    scheduler = scheduler_for(system, prepared.plan)
    shortest, longest, share = scheduler.pace
    run_all(
        with_defaults(prepared),
        root,
        scheduler,
        observer,
        judge_in(root),
        pace=Pace(shortest, system.monitor_interval or longest, share=share),
        only_cancel=only_cancel,
        has_lock=True,
        is_throttled=is_throttled,
        choosers=choosers,
        may_be_late=scheduler.may_be_late,
        interrupts=interrupts,
    )


def report(root: Path, observed: "Observed | None" = None, **options: "FindHistory") -> "RunReport":
    """Judge the files in a run's directory and write the reports; `options` are the options of `write_report`.

    While runs are unfinished, nothing is written.
    No other process holds the directory: the caller has `driver_lock`, or `no_driver`.
    observed: as in `build_report`.

    BadInput: the directory contains nothing to report, or cannot be read; nothing was written.
    """
    from cloudai_mbridge.report import build_report, write_report

    result = build_report(root, observed) if observed else build_report(root)
    if not result.is_unfinished:
        write_report(result, root, **options)
    return result


@contextlib.contextmanager
def observing(root: Path) -> "Iterator[Observed]":
    """Yield where a run stands, and keep it from being driven meanwhile unless a process holds it already.

    Of a run that no process holds, the jobs are looked up in their scheduler, once; nothing is changed.
    MBridgeError: the plan or the journal cannot be read.
    """
    from cloudai_mbridge.runner.lock import reading

    with reading(root) as held_by:
        yield observe(root, held_by)


def observe(root: Path, held_by: str | None, scheduler: "Scheduler | None" = None) -> "Observed":
    """Return where a run stands. held_by: as in `reading`. scheduler: as of `reader_of`; default: a new one."""
    from cloudai_mbridge.runner.observe import observe

    planned = read_plan_data(root)["runs"]
    return observe(root, held_by, planned, lambda: scheduler or reader_of(root, planned))


def reader_of(root: Path, planned: Iterable[Mapping[str, Any]]) -> "Scheduler":
    """Return the scheduler of a run, to observe its jobs only. planned: the plan's runs."""
    launchers = {launcher_of(run.get("upstream")) for run in planned}
    return _scheduler(load_system(root / ROOT_FILES.system), launchers, ())


def read_status(root: Path, *, with_events: bool = False) -> "RunStatus":
    """Return where the points of a run stand, also while it is under way; as `control.read_status`."""
    from cloudai_mbridge.runner import control

    try:
        with observing(root) as observed:
            return control.read_status(root, with_events=with_events, observed=observed)
    except Damaged:  # which the status contains
        return control.read_status(root, with_events=with_events)


def scheduler_for(system: System, plan: ScenarioPlan) -> "Scheduler":
    """Return the scheduler of a plan on a system: one per launcher, if the plan has runs of both."""
    return _scheduler(system, {run.launcher for run in plan.runs}, plan.runs)


def _scheduler(system: System, launchers: Collection[RunLauncher], runs: Sequence[RunPlan]) -> "Scheduler":
    if MEGATRON_BRIDGE not in launchers:
        return _embedded(system, runs)
    from cloudai_mbridge.schedulers.megatron_bridge import ByLauncher, UpstreamClient

    upstream = UpstreamClient(slurm_of(system), runs)
    return ByLauncher(_embedded(system, runs), upstream) if EMBEDDED in launchers else upstream


def _embedded(system: System, runs: Sequence[RunPlan]) -> "Scheduler":
    """Return the scheduler of the embedded loop on a system."""
    from cloudai_mbridge.integrations.nemo_run import NemoRunSlurmClient, require_nemo_run
    from cloudai_mbridge.schedulers.local import LocalClient
    from cloudai_mbridge.schedulers.slurm import SlurmClient

    uses_nemo_run = system.executor is Executor.NEMO_RUN
    if isinstance(system, LocalSystem):
        needed = (require_nemo_run,) if uses_nemo_run else ()
        return LocalClient(system, runs, *needed)
    return (NemoRunSlurmClient if uses_nemo_run else SlurmClient)(system)


def with_defaults(prepared: Prepared) -> ScenarioPlan:
    """Return the plan with the system's limits: one run at a time here; on a cluster, the queueing is Slurm's."""
    config, runs = prepared.plan.runner, prepared.plan.runs
    limits = [1] if prepared.system.is_one_machine else [run.launcher.max_parallel for run in runs]
    limit = min((limit for limit in limits if limit is not None), default=None)
    limited = config if config.max_parallel else config.model_copy(update={"max_parallel": limit})
    return replace(prepared.plan, runner=limited)
