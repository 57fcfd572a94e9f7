"""The one writer: create a run's directory and put the rendered files into it."""

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.launch.render import render
from cloudai_mbridge.models.system import System
from cloudai_mbridge.plan import ROOT_FILES, RejectedPoint, RunPlan, SweepPlan
from cloudai_mbridge.sweep.run_id import slug

PLAN_VERSION = 1
_NOT_WRITTEN = ("secret_env", "training_config", "definition")


def create_root(output_dir: Path, scenario: str, now: datetime) -> Path:
    """Create a new directory SCENARIO_DATE_TIME below `output_dir`, never one that exists.

    Raises:
        BadInput: the directory cannot be created or written.
    """
    name = f"{slug(scenario)}_{now:%Y-%m-%d_%H-%M-%S}"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"_{n}" for n in range(1, 1000))):
            root = output_dir.resolve() / (name + suffix)
            try:
                root.mkdir()
            except FileExistsError:
                continue
            return root
    except OSError as error:
        raise BadInput(f"{output_dir}: cannot be written ({error.strerror}); choose another --output-dir") from None
    raise BadInput(f"{output_dir}: has a thousand runs of this second; choose another --output-dir")


def write_runs(plan: SweepPlan, system: System, root: Path) -> None:
    """Write the plan and every run's files below `root`."""
    (root / ROOT_FILES.plan).write_text(json.dumps(plan_to_dict(plan), indent=2) + "\n", encoding="utf-8")
    for run in plan.runs:
        directory = root / run.key
        directory.mkdir(parents=True)
        for name, text in render(run, system).items():
            (directory / name).write_text(text, encoding="utf-8")


def plan_to_dict(plan: SweepPlan) -> dict[str, Any]:
    """Return the plan as plain data, without credentials."""
    return {
        "version": PLAN_VERSION,
        "scenario": plan.scenario,
        "system": plan.system,
        "runs": [_run_to_dict(run) for run in plan.runs],
        "rejected": [_rejected_to_dict(point) for point in plan.rejected],
        "num_rejected": plan.num_rejected,
        "rule_counts": dict(plan.rule_counts),
        "notes": list(plan.notes),
    }


def _run_to_dict(run: RunPlan) -> dict[str, Any]:
    return {name: value for name, value in asdict(run).items() if name not in _NOT_WRITTEN}


def _rejected_to_dict(point: RejectedPoint) -> dict[str, Any]:
    violations = [{**asdict(violation), "message": str(violation)} for violation in point.violations]
    return {**asdict(point), "violations": violations}
