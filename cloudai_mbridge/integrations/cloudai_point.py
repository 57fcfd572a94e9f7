"""One test run of CloudAI as a run of ours: planned, written, judged. Imports nothing of CloudAI.

A test run's output directory becomes the root of a run of ours, with plan, scripts, journal and report.json in it; its
one point runs in a directory below. CloudAI expands sweeps, submits and waits.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from cloudai_mbridge.constraints import RuleSet
from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.launch import write_plan, write_runs
from cloudai_mbridge.launch.write import refuse_output_dir
from cloudai_mbridge.models import TestScenario
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.loading import LoadedScenario, LoadedTest
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.models.test_definition import TEMPLATE as OUR_TEMPLATE
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES, RunPlan, ScenarioPlan
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.plan.read import read_plan_data
from cloudai_mbridge.plan.run_plan import SearchPlan
from cloudai_mbridge.plan.walk import PointWalk
from cloudai_mbridge.report import PointReport, build_report, write_report
from cloudai_mbridge.runner import Journal
from cloudai_mbridge.schedulers.interface import JobClass
from cloudai_mbridge.schedulers.slurm.commands import status_from_marker
from cloudai_mbridge.sweep.expand import NUM_NODES

TEMPLATE = "MegatronBridgeEmbedded"
# output directory of every point that was judged in this process -> whether it failed
failed_points: dict[str, bool] = {}
_SHARED = {
    *("name", "description", "extra_env_vars", "extra_cmd_args", "extra_container_mounts", "nsys", "metrics"),
    *("training_report", "dse_excluded_args"),
}
# CloudAI's system has more fields, and some with the same name and other contents
_SYSTEM = (
    *("name", "default_partition", "account", "distribution", "mpi", "gpus_per_node", "container_mount_home"),
    *("extra_srun_args", "extra_sbatch_args", "global_env_vars"),
)
_SCHEDULERS = ("slurm", "standalone")
Placement = tuple[int | list[int], list[str]]


class Refused(click.ClickException):
    """One clear line: CloudAI's command line is click's, which prints it and ends with this exit code."""

    exit_code = BadInput.exit_code


def plan_of(tr: Any, system: Any, placement: Placement | None = None, definition: Any = None) -> ScenarioPlan:
    """Plan a test run, or a whole sweep that CloudAI has not expanded yet.

    placement: the number of nodes and their names, if CloudAI has chosen them.

    Refused: this tool rejects it.
    """
    if getattr(tr, "pre_test", None) or getattr(tr, "post_test", None):
        raise Refused(f"{tr.name}: {TEMPLATE} runs no pre_test or post_test; remove them from the scenario")
    try:
        ours = _definition(tr.test if definition is None else definition)
        num_nodes, nodes = placement or _asked_for(tr)
        entry = {
            "id": tr.name,
            "test_name": ours.name,
            "num_nodes": num_nodes,
            "nodes": nodes,
            "exclude_nodes": [] if nodes else list(getattr(tr, "exclude_nodes", None) or []),
            "time_limit": tr.time_limit,
        }
        scenario = TestScenario.model_validate({"name": tr.name, "Tests": [entry]})
        loaded = LoadedScenario(scenario, [LoadedTest(scenario.tests[0], ours)])
        plan = build_plan(loaded, _system(system, tr))
        if names := sorted({name for run in plan.runs for name in run.secret_env}):  # CloudAI dumps a test as it is
            raise BadInput(f"CloudAI would write {', '.join(names)} into files; remove it from the TOML and export it")
        return plan
    except ValidationError as error:
        mistakes = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise Refused(f"{tr.name}: {'; '.join(mistakes)}") from None
    except BadInput as error:
        raise Refused(f"{tr.name}: {error}") from None


def known_of(tr: Any, system: Any, actions: Sequence[Mapping[str, Any]]) -> list[SearchPlan | None]:
    """Return the search plan of every point of a sweep, None for a point that breaks a rule.

    actions: the points as CloudAI names them. Refused: not a test of Megatron-Bridge, or not in a known form.
    """
    template = tr.test.test_template_name
    if template not in (TEMPLATE, OUR_TEMPLATE):
        raise Refused(f"{tr.name}: is a {template}, not a {TEMPLATE} or {OUR_TEMPLATE}")
    try:
        ours = _definition(tr.test, Launcher.EMBEDDED if template == TEMPLATE else Launcher.MEGATRON_BRIDGE)
        run = TestRun.model_validate({"id": tr.name, "test_name": ours.name, "num_nodes": _asked_for(tr)[0]})
        walk = PointWalk(LoadedTest(run, ours), _system(system, tr), RuleSet.RELEASE, None)
        decided = [(each.coordinates, each) for each in walk]
        known = {_place(where): walk.search_plan(each) for where, each in decided if each.is_run}
    except ValidationError as error:
        raise Refused(f"{tr.name}: {error.errors()[0]['msg']}") from None
    except BadInput as error:
        raise Refused(f"{tr.name}: {error}") from None
    theirs = {name: name.replace("env.", "extra_env_vars.", 1) for where, _ in decided for name in where}
    theirs |= {NUM_NODES: "NUM_NODES"} if NUM_NODES in theirs else {}
    return [known.get(_place({name: action.get(theirs[name]) for name in theirs})) for action in actions]


def _place(coordinates: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    return frozenset((name, str(value)) for name, value in coordinates.items())


def refuse(tr: Any, system: Any) -> None:
    """Refuse a test run that cannot run, before anything is submitted. The points of a sweep are rejected one by one.

    Refused: a rule rejects the point, or a requested feature is not implemented.
    """
    if system.scheduler not in _SCHEDULERS:
        raise Refused(f"{tr.name}: {TEMPLATE} runs on {' and '.join(_SCHEDULERS)} systems, not on {system.scheduler}")
    plan = plan_of(tr, system)
    if not tr.is_dse_job:
        the_run(plan)


def the_run(plan: ScenarioPlan) -> RunPlan:
    """Return the plan's only run; Refused: rules reject it."""
    if plan.rejected:
        raise Refused(f"{plan.scenario}: {'; '.join(str(violation) for violation in plan.rejected[0].violations)}")
    if len(plan.runs) != 1:
        raise Refused(
            f"{plan.scenario}: {len(plan.runs)} points, which CloudAI runs as one; "
            "write one value for each argument and remove env_params"
        )
    return plan.runs[0]


def prepare(tr: Any, system: Any, placement: Placement | None = None) -> Path:
    """Write a test run's files, once, and return the directory that its script starts in.

    Refused: a rule rejects the point, or a requested feature is not implemented.
    """
    root = Path(tr.output_path).absolute()
    if not (root / ROOT_FILES.plan).exists():
        plan = plan_of(tr, system, placement)
        run = the_run(plan)
        try:
            refuse_output_dir(root, _system(system, tr), plan.runs)
        except BadInput as error:
            raise Refused(f"{tr.name}: {error}") from None
        root.mkdir(parents=True, exist_ok=True)
        write_runs(plan, _system(system, tr), root)
        with closing(Journal(root / ROOT_FILES.journal)) as journal:
            journal.plan([run.key])
        write_plan(plan, root)
    return root / str(read_plan_data(root)["runs"][0]["key"])


def is_prepared(output_path: Path) -> bool:
    """Return whether a test run was written, and so may have been submitted."""
    return (Path(output_path) / ROOT_FILES.plan).is_file()


def judged(output_path: Path) -> PointReport:
    """Record the job's end from its own marker, write the reports, and return the point.

    BadInput: the directory was not written by `prepare`, or a file in it cannot be read or written.
    """
    root = Path(output_path).absolute()
    try:
        key = read_plan_data(root)["runs"][0]["key"]
        if not (root / key / POINT_FILES.started).exists():
            raise BadInput(f"{root}: the job has not started")
        marker = None
        with suppress(FileNotFoundError):
            marker = read_regular(root / key / POINT_FILES.exit_code).decode(errors="replace")
        with closing(Journal(root / ROOT_FILES.journal)) as journal:
            if not journal.entry(key).attempts:  # CloudAI has submitted it
                journal.intend([(key, 1)], OUR_TEMPLATE)
            status = status_from_marker(marker)
            journal.saw(key, 1, status if status.is_final else replace(status, job_class=JobClass.LOST))
        report = build_report(root)
        write_report(report, root)
        return report.points[0]
    except (ToolFailure, OSError, sqlite3.Error) as error:
        raise BadInput(f"{root}: cannot be judged ({error})") from None


def _definition(theirs: Any, launcher: Launcher = Launcher.EMBEDDED) -> TestDefinition:
    shared = _SHARED if launcher is Launcher.EMBEDDED else _SHARED | {"git_repos"}
    data = theirs.model_dump(mode="json", include=shared, exclude_none=True)
    # CloudAI writes every default out when a scenario refers to a test; only other values were requested
    args = theirs.cmd_args.model_dump(mode="json", exclude_defaults=True)
    return TestDefinition.model_validate(
        {**data, "test_template_name": OUR_TEMPLATE, "cmd_args": {**args, "launcher": launcher}}
    )


def _asked_for(tr: Any) -> Placement:
    """Return nodes as the scenario names them; CloudAI's PARTITION:GROUP:NUMBER only gives the number so far."""
    if not any(":" in spec for spec in tr.nodes):
        return tr.num_nodes, list(tr.nodes)
    counts = [spec.rpartition(":")[2] for spec in tr.nodes]
    return sum(map(int, counts)) if all(count.isdecimal() for count in counts) else tr.num_nodes, []


def _system(theirs: Any, tr: Any) -> System:
    found = {name: value for name in _SYSTEM if (value := getattr(theirs, name, None)) is not None}
    if getattr(theirs, "scheduler", "slurm") == "standalone":
        kept = {name: found[name] for name in ("name", "global_env_vars") if name in found}
        return LocalSystem.model_validate({**kept, "scheduler": "standalone"})
    srun_args = [text for text in (found.get("extra_srun_args"), getattr(tr, "extra_srun_args", None)) if text]
    partition = found.setdefault("default_partition", "none")
    return SlurmSystem.model_validate(
        {
            "name": "cloudai",
            **found,
            "scheduler": "slurm",
            "partitions": [{"name": partition}],
            "extra_srun_args": " ".join(srun_args) or None,
        }
    )
