"""The one writer: create a run's directory and put the rendered files into it."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from importlib.resources import files as files_of
from pathlib import Path
from typing import Any

from cloudai_mbridge import megatron_bridge
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.documents import render_toml
from cloudai_mbridge.files.replace import naming
from cloudai_mbridge.files.run_files import ROOT_NAME
from cloudai_mbridge.files.text import slug
from cloudai_mbridge.launch.script import (
    LAUNCHER_START,
    array_script,
    render_array_script,
    render_local_script,
    render_slurm_script,
)
from cloudai_mbridge.models.credentials import is_secret_variable
from cloudai_mbridge.models.system import SlurmSystem, System, slurm_of
from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES, RunPlan, ScenarioPlan
from cloudai_mbridge.plan.launcher_command import render_launcher_script
from cloudai_mbridge.plan.launchers import MEGATRON_BRIDGE
from cloudai_mbridge.plan.read import PLAN_VERSION
from cloudai_mbridge.plan.values import problem_of_directory

_NOT_NEEDED = {"data_repository", "reports", "group_allocated"}  # CloudAI's own, which may hold credentials
_NOT_WRITTEN = ("secret_env", "training_config", "definition")


def refuse_output_dir(output_dir: Path, system: System, runs: Iterable[RunPlan]) -> None:
    """Raise BadInput if Slurm could not open the output of a job below a directory, or no container could mount it."""
    path = str(output_dir.resolve())
    is_pasted = {run.launcher.pastes_words for run in runs if _mounts_its_directory(run)}
    for each in sorted(is_pasted):
        if problem := problem_of_directory(Path(path), is_pasted=each):
            raise BadInput(f"{path}: a container cannot mount it: {problem}; choose another --output-dir")
    if found := system.refused_in(path):
        raise BadInput(
            f"{path}: Slurm reads {found!r} in the path of a job's output as a pattern of its own, and the job would"
            " fail; choose another --output-dir"
        )


def _mounts_its_directory(run: RunPlan) -> bool:
    """Return whether a run is in a container and writes below its own directory there."""
    return not run.of_launcher.args.get("log_dir") if run.launcher.pastes_words else bool(run.container_image)


def create_root(output_dir: Path, scenario: str, now: datetime) -> Path:
    """Create a new directory SCENARIO_DATE_TIME below `output_dir`, never an existing one; BadInput if it cannot."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"_{n}" for n in range(1, 1000))):
            root = output_dir.resolve() / ROOT_NAME.format(scenario=slug(scenario), now=now, suffix=suffix)
            try:
                root.mkdir()
            except FileExistsError:
                continue
            return root
    except OSError as error:
        raise BadInput(f"{output_dir}: cannot be written ({error.strerror}); choose another --output-dir") from None
    raise BadInput(f"{output_dir}: already has a thousand runs from this second; choose another --output-dir")


def write_runs(plan: ScenarioPlan, system: System, root: Path) -> None:
    """Write every run's files below `root`."""
    write_file(root / ROOT_FILES.system, render_toml(system_to_dict(system)))
    for run in plan.runs:
        directory = root / run.key
        directory.mkdir(parents=True)
        for name, text in render(run, system).items():
            write_file(directory / name, text)
    write_arrays(plan.runs, system, root)


def write_arrays(runs: Iterable[RunPlan], system: System, root: Path) -> None:
    """Write the scripts and links of all arrays below `root`."""
    for run in runs:
        if run.array:
            if not (root / run.array).exists():
                (root / run.array).mkdir(parents=True)
                write_file(root / array_script(run.array), render_array_script(run.array, run, slurm_of(system)))
            (root / run.array / str(run.array_index)).symlink_to(Path("../..", run.key), target_is_directory=True)


def write_file(path: Path, text: str) -> None:
    """Write a new file, in place of a file or link of that name. A link that somebody placed there is not followed."""
    with naming(path):
        path.unlink(missing_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)


def write_plan(plan: ScenarioPlan, root: Path) -> None:
    """Write the plan, after everything else: a directory that has one is complete."""
    unfinished = root / ROOT_FILES.unfinished_plan
    write_file(unfinished, json.dumps(plan_to_dict(plan), indent=2) + "\n")
    unfinished.rename(root / ROOT_FILES.plan)


def plan_to_dict(plan: ScenarioPlan) -> dict[str, Any]:
    """Return the plan as plain data, without credentials."""
    return {
        "version": PLAN_VERSION,
        "scenario": plan.scenario,
        "system": plan.system,
        "dry_run": plan.dry_run,
        "repository": plan.repository,
        "options": list(plan.options),
        "tests": list(plan.tests),
        "runs": [
            {
                **{name: value for name, value in asdict(run).items() if name not in _NOT_WRITTEN},
                "secret_names": sorted(run.secret_env),
            }
            for run in plan.runs
        ],
        "rejected": [
            {**asdict(point), "violations": [{**asdict(each), "message": str(each)} for each in point.violations]}
            for point in plan.rejected
        ],
        "num_rejected": plan.num_rejected,
        "rule_counts": dict(plan.rule_counts),
        "notes": list(plan.notes),
        "left_out": [asdict(point) for point in plan.left_out],
        "runner": plan.runner.model_dump(mode="json"),
    }


def system_to_dict(system: System) -> dict[str, Any]:
    """Return the system as the content of its file, without credentials."""
    data = system.model_dump(mode="json", exclude_none=True, exclude_defaults=True, exclude=_NOT_NEEDED)
    env = {name: value for name, value in system.global_env_vars.items() if not is_secret_variable(name, value)}
    return {**data, **({"global_env_vars": env} if "global_env_vars" in data else {}), "scheduler": system.scheduler}


def render(plan: RunPlan, system: System) -> dict[str, str]:
    """Return the files of a run: name -> text. No file holds a credential."""
    files = {POINT_FILES.definition: render_toml(plan.definition)}
    if plan.launcher is MEGATRON_BRIDGE:
        files[POINT_FILES.launcher_starter] = (files_of(megatron_bridge) / "start_launcher.py").read_text(
            encoding="utf-8"
        )
        files[POINT_FILES.launcher_script] = render_launcher_script(plan, slurm_of(system), LAUNCHER_START)
        return files
    files[POINT_FILES.training_config] = json.dumps(plan.training_config, indent=2) + "\n"
    if isinstance(system, SlurmSystem):
        files[POINT_FILES.slurm_script] = render_slurm_script(plan, system)
    else:
        files[POINT_FILES.local_script] = render_local_script(plan, system)
    return files
