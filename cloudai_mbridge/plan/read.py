"""Read a plan back from the directory of its run, to take the run up again."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cloudai_mbridge.errors import BadInput, Damaged, NothingRan, OtherVersion, shown
from cloudai_mbridge.files.json_text import parse_json
from cloudai_mbridge.files.regular import NotRegular, read_regular
from cloudai_mbridge.files.run_files import IS_ROOT_NAME, ROOT_FILES
from cloudai_mbridge.megatron_bridge.launcher.plan import Repo, UpstreamPlan
from cloudai_mbridge.models.scenario import RunnerConfig
from cloudai_mbridge.plan.plan_file import mistake_in_plan
from cloudai_mbridge.plan.run_plan import RunPlan, ScenarioPlan

PLAN_VERSION = 2
_AGAIN = "restore the file, or run the scenario again"


def read_plan_data(root: Path) -> dict[str, Any]:
    """Return what plan.json holds: every part that is there has the right type.

    Raises:
        BadInput: the directory is not the directory of a run.
        NothingRan: it is of a run that ended before its plan was written.
        OtherVersion, Damaged: the plan cannot be read.
    """
    path = root / ROOT_FILES.plan
    if not path.is_file():
        raise _not_a_run(root)
    try:
        plan = parse_json(read_regular(path))
    except NotRegular as error:
        raise Damaged(f"{path}: is damaged ({error.strerror}); {_AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: is damaged ({shown(str(error))}); {_AGAIN}") from None
    if not isinstance(plan, dict) or plan.get("version") != PLAN_VERSION:
        version = plan.get("version") if isinstance(plan, dict) else None
        raise OtherVersion(
            f"{path}: has version {shown(version)}, and this mbridge reads version {PLAN_VERSION};"
            " use the mbridge that wrote it"
        )
    if mistake := mistake_in_plan(plan):
        raise Damaged(f"{path}: is damaged ({mistake}); {_AGAIN}")
    return plan


def _not_a_run(root: Path) -> BadInput:
    """Return what to say of a directory without a plan."""
    is_named_so = root.is_dir() and IS_ROOT_NAME.fullmatch(root.resolve().name) is not None
    if is_named_so or (root / ROOT_FILES.unfinished_plan).is_file():
        return NothingRan(
            f"{root}: is incomplete ({ROOT_FILES.plan} is missing): mbridge ended before it had written all files,"
            " and submitted nothing; run the scenario again"
        )
    what = "no such directory"
    if root.exists():
        what = f"{ROOT_FILES.plan} is missing" if root.is_dir() else "not a directory"
    return BadInput(f"{root}: is not a run directory ({what}); give the directory that `mbridge run` printed")


def is_of_dry_run(root: Path, plan: Mapping[str, Any]) -> bool:
    """Return whether a plan is of a dry run: it says so, or was written before plans did, and nothing has driven it."""
    was_driven = any((root / name).exists() for name in (ROOT_FILES.journal, ROOT_FILES.driver_lock))
    return bool(plan.get("dry_run", not was_driven))


def refuse_dry_run(root: Path, plan: Mapping[str, Any]) -> None:
    """Raise NothingRan of the plan of a dry run."""
    if is_of_dry_run(root, plan):
        raise NothingRan(f"{root}: is a dry run, so nothing was submitted; start its scenario with `mbridge run`")


def is_dry_run(root: Path) -> bool:
    """Return whether a directory is known as that of a dry run; False of one that cannot be read."""
    try:
        return is_of_dry_run(root, read_plan_data(root))
    except BadInput:
        return False


def require_directories(root: Path, keys: Iterable[str]) -> None:
    """Raise Damaged unless every run's directory is, or can be made, below the root: no link leads to it."""
    checked: set[Path] = set()
    for key in keys:
        if key.startswith("/") or ".." in key.split("/"):
            raise Damaged(f"{root}: {shown(key)} is not a path inside the directory; nothing was written")
        for path in [root / key, *(root / key).parents]:
            if path == root or path in checked:
                break
            checked.add(path)
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise Damaged(f"{path}: is a link or a file where the directory of a run was; put the directory back")


def read_plan(root: Path, *, needs_secrets: bool = True) -> ScenarioPlan:
    """Return the plan of a run with the credentials from the environment; its rejected points are left out.

    needs_secrets: False if nothing will be submitted.
    BadInput: as above, or a credential is not in the environment.
    """
    data = read_plan_data(root)
    try:
        return _plan(data, root, needs_secrets)
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        reason = shown(f"{type(error).__name__}: {error}")
        raise Damaged(f"{root / ROOT_FILES.plan}: is damaged ({reason}); {_AGAIN}") from None


def _plan(data: dict[str, Any], root: Path, needs_secrets: bool) -> ScenarioPlan:
    runs = tuple(_run(run) for run in data["runs"])
    missing = sorted({name for run in data["runs"] for name in run["secret_names"]} - set(os.environ))
    if missing and needs_secrets:
        names = ", ".join(missing)
        raise BadInput(f"{root}: its runs need {names}, which no file holds; set {names} in the environment")
    return ScenarioPlan(
        scenario=data["scenario"],
        tests=tuple(data["tests"]),
        system=data["system"],
        runs=runs,
        rejected=(),
        num_rejected=data["num_rejected"],
        dry_run=data.get("dry_run", False),
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
