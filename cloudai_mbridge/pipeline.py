"""The main path: plan, write, run, report. A dry run is the same path, stopped after the files are written."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cloudai_mbridge.integrations import nemo_run
from cloudai_mbridge.jobs import Scheduler
from cloudai_mbridge.launch import write_runs
from cloudai_mbridge.launch.write import create_root
from cloudai_mbridge.local import LocalClient
from cloudai_mbridge.models.load import Warn, load_scenario, load_system
from cloudai_mbridge.models.system import Executor, LocalSystem, System
from cloudai_mbridge.plan import ROOT_FILES, SweepPlan
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.report import Report, build_report, write_report
from cloudai_mbridge.runner import Journal, Observer, run_all
from cloudai_mbridge.slurm import SlurmClient
from cloudai_mbridge.upstream import ByLauncher, UpstreamClient

# Every run of the upstream launcher keeps a process on this machine until its job has ended.
MOST_LAUNCHERS = 32


@dataclass(frozen=True)
class Request:
    """A scenario on a system, as the command line names them; `on_unknown_arg` as in `load_scenario`."""

    system_config: Path
    test_scenario: Path
    tests_dir: Path | None
    output_dir: Path | None
    on_unknown_arg: Warn | None = None


@dataclass(frozen=True)
class Prepared:
    """A plan on its system. Nothing has been written or submitted."""

    plan: SweepPlan
    system: System
    output_dir: Path


def plan(request: Request) -> Prepared:
    """Load everything and decide about every point."""
    system = load_system(request.system_config)
    scenario = load_scenario(request.test_scenario, request.tests_dir, request.on_unknown_arg)
    return Prepared(build_plan(scenario, system), system, request.output_dir or Path(system.output_path))


def preflight(prepared: Prepared) -> None:
    """Find out, before anything is written, whether the system would take the runs."""
    if prepared.plan.runs:
        scheduler_for(prepared.system, prepared.plan).preflight()


def write(prepared: Prepared) -> Path:
    """Write everything that a run submits into a new directory and return it. A dry run ends here."""
    root = create_root(prepared.output_dir, prepared.plan.scenario, datetime.now())
    write_runs(prepared.plan, prepared.system, root)
    if prepared.system.executor is Executor.NEMO_RUN:
        nemo_run.write_scripts(prepared.plan, prepared.system, root)
    return root


def execute(prepared: Prepared, root: Path, observer: Observer) -> None:
    """Submit what was written and watch it to its end."""
    is_local = isinstance(prepared.system, LocalSystem)
    journal = Journal(root / ROOT_FILES.journal)
    try:
        journal.plan(run.key for run in prepared.plan.runs)
        run_all(
            prepared.plan,
            root,
            scheduler_for(prepared.system, prepared.plan),
            journal,
            observer,
            max_parallel=_max_parallel(prepared),
            interval_s=prepared.system.monitor_interval or (0.2 if is_local else 2.0),
        )
    finally:
        journal.close()


def report(root: Path) -> Report:
    """Judge what lies in a run's directory and write the reports."""
    result = build_report(root)
    write_report(result, root)
    return result


def scheduler_for(system: System, plan: SweepPlan) -> Scheduler:
    """Return what runs a plan on a system: by launcher, if the plan has runs of both."""
    if isinstance(system, LocalSystem):
        return _embedded(system)
    launchers = {run.upstream is not None for run in plan.runs}
    if launchers == {True}:
        return UpstreamClient(system, plan.runs)
    embedded = _embedded(system)
    return ByLauncher(embedded, UpstreamClient(system, plan.runs)) if True in launchers else embedded


def _embedded(system: System) -> Scheduler:
    """Return what runs the embedded loop on a system."""
    scheduler = LocalClient(system) if isinstance(system, LocalSystem) else SlurmClient(system)
    return nemo_run.NemoRunClient(system, scheduler) if system.executor is Executor.NEMO_RUN else scheduler


def _max_parallel(prepared: Prepared) -> int:
    """Return how many runs may be submitted at a time: on a cluster, the queueing is Slurm's."""
    if isinstance(prepared.system, LocalSystem):
        return 1
    runs = prepared.plan.runs
    return min(len(runs), MOST_LAUNCHERS) if any(run.upstream is not None for run in runs) else len(runs)
