"""Read a plan back from the directory of its run, to take the run up again."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.runner_config import RunnerConfig
from cloudai_mbridge.plan.paths import ROOT_FILES
from cloudai_mbridge.plan.run_plan import Repo, RunPlan, SweepPlan, UpstreamPlan
from cloudai_mbridge.regular_file import read_regular

PLAN_VERSION = 2


def read_plan_data(root: Path) -> dict[str, Any]:
    """Return what plan.json holds.

    Raises:
        BadInput: the directory holds no plan, a damaged one, or another version's.
    """
    path = root / ROOT_FILES.plan
    if not path.is_file():
        raise BadInput(
            f"{root}: holds no run ({ROOT_FILES.plan} is missing); give the directory that `mbridge run` named"
        )
    try:
        plan = json.loads(read_regular(path).decode())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: is damaged ({error})") from None
    if not isinstance(plan, dict) or plan.get("version") != PLAN_VERSION:
        raise BadInput(f"{path}: is no plan of version {PLAN_VERSION}; use the mbridge that made it")
    if not _is_whole(plan):
        raise BadInput(f"{path}: is damaged (it lacks a part)")
    return plan


def _is_whole(plan: dict[str, Any]) -> bool:
    """Return whether a plan names its scenario and its runs."""
    runs = plan.get("runs")
    return "scenario" in plan and isinstance(runs, list) and all(isinstance(run, dict) and "key" in run for run in runs)


def read_plan(root: Path, *, needs_secrets: bool = True) -> SweepPlan:
    """Return the plan of a run with the credentials from the environment; its rejected points are left out.

    needs_secrets: False if nothing will be submitted.

    Raises:
        BadInput: as above, or a credential is not in the environment.
    """
    data = read_plan_data(root)
    try:
        return _plan(data, root, needs_secrets)
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise BadInput(f"{root / ROOT_FILES.plan}: is damaged ({type(error).__name__}: {error})") from None


def _plan(data: dict[str, Any], root: Path, needs_secrets: bool) -> SweepPlan:
    runs = tuple(_run(run) for run in data["runs"])
    missing = sorted({name for run in data["runs"] for name in run["secret_names"]} - set(os.environ))
    if missing and needs_secrets:
        names = ", ".join(missing)
        raise BadInput(f"{root}: its runs need {names}, which no file holds; set {names} in the environment")
    return SweepPlan(
        scenario=data["scenario"],
        tests=tuple(data["tests"]),
        system=data["system"],
        runs=runs,
        rejected=(),
        num_rejected=data["num_rejected"],
        rule_counts=data["rule_counts"],
        notes=tuple(data["notes"]),
        runner=RunnerConfig.model_validate(data["runner"]),
    )


def _run(data: dict[str, Any]) -> RunPlan:
    """Return a run. What only its files need was not written down and stays empty."""
    secrets = {name: os.environ.get(name, "") for name in data["secret_names"]}
    names = {field.name for field in fields(RunPlan)}
    values: dict[str, Any] = {name: value for name, value in data.items() if name in names}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    values["upstream"] = _upstream(data["upstream"]) if data["upstream"] else None
    return RunPlan(**{**values, "training_config": {}, "definition": {}, "secret_env": secrets})


def _upstream(data: dict[str, Any]) -> UpstreamPlan:
    repos = {name: Repo(**data[name]) for name in ("megatron_bridge", "nemo_run")}
    lists = {"slurm_params": tuple(data["slurm_params"]), "mounted": tuple(Repo(**repo) for repo in data["mounted"])}
    lists["credentials"] = tuple(data.get("credentials", ()))
    return UpstreamPlan(**{**data, **repos, **lists})
