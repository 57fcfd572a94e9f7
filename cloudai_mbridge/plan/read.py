"""Read a plan back from the directory of its run, to continue the run."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, create_model

from cloudai_mbridge.constraints import Violation
from cloudai_mbridge.errors import BadInput, Damaged, NothingRan, OtherVersion, shown
from cloudai_mbridge.files.documents import parse_json
from cloudai_mbridge.files.regular import NotRegular, read_regular
from cloudai_mbridge.files.run_files import IS_ROOT_NAME, ROOT_FILES
from cloudai_mbridge.megatron_bridge.launcher_plan import Repo, UpstreamPlan
from cloudai_mbridge.models.scenario import RunnerConfig
from cloudai_mbridge.plan.run_plan import LeftOut, RejectedPoint, RunPlan, ScenarioPlan, SearchPlan

PLAN_VERSION = 2
_AGAIN = "restore the file, or run the scenario again"


def read_plan_data(root: Path) -> dict[str, Any]:
    """Return the content of plan.json: every part in it has the right type.

    BadInput: the directory is not a run directory. NothingRan: its run ended before the plan was written.
    OtherVersion, Damaged: the plan cannot be read.
    """
    path = root / ROOT_FILES.plan
    if not path.is_file():
        raise _not_a_run(root)
    try:
        plan: Any = parse_json(read_regular(path))
    except NotRegular as error:
        raise Damaged(f"{path}: is damaged ({error.strerror}); {_AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: is damaged ({shown(str(error))}); {_AGAIN}") from None
    if not isinstance(plan, dict):
        plan = {}
    version = plan.get("version")
    if version != PLAN_VERSION:
        raise OtherVersion(
            f"{path}: has version {shown(version)}, and this mbridge reads version {PLAN_VERSION};"
            " use the mbridge that wrote it"
        )
    if mistake := mistake_in_plan(plan):
        raise Damaged(f"{path}: is damaged ({mistake}); {_AGAIN}")
    return cast("dict[str, Any]", plan)


def _not_a_run(root: Path) -> BadInput:
    """Return the error for a directory without a plan."""
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
    """Return whether a plan is of a dry run: it is marked so, or predates the mark and was never driven."""
    was_driven = any((root / name).exists() for name in (ROOT_FILES.journal, ROOT_FILES.driver_lock))
    return bool(plan.get("dry_run", not was_driven))


def refuse_dry_run(root: Path, plan: Mapping[str, Any]) -> None:
    """Raise NothingRan of the plan of a dry run."""
    if is_of_dry_run(root, plan):
        raise NothingRan(f"{root}: is a dry run, so nothing was submitted; start its scenario with `mbridge run`")


def is_dry_run(root: Path) -> bool:
    """Return whether a directory is of a dry run; False if it cannot be read."""
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
        if isinstance(error, ValidationError) and (names := _unknown_fields(error)):
            what = f"{root / ROOT_FILES.plan}: has {names}, which this mbridge does not know"
            raise OtherVersion(f"{what}; use the mbridge that wrote it") from None
        reason = shown(f"{type(error).__name__}: {error}")
        raise Damaged(f"{root / ROOT_FILES.plan}: is damaged ({reason}); {_AGAIN}") from None


def _unknown_fields(error: ValidationError) -> str:
    """Return the fields of a newer mbridge, if nothing else is wrong; "" otherwise."""
    mistakes = error.errors()
    if any(mistake["type"] != "extra_forbidden" for mistake in mistakes):
        return ""
    return ", ".join(".".join(map(str, mistake["loc"])) for mistake in mistakes)


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
        repository=data.get("repository"),
        options=tuple(data.get("options") or ()),
        rule_counts=data["rule_counts"],
        notes=tuple(data["notes"]),
        left_out=tuple(LeftOut(**point) for point in data.get("left_out", ())),
        runner=RunnerConfig.model_validate(data["runner"]),
    )


def _run(data: dict[str, Any]) -> RunPlan:
    """Return a run. Values that only its files need were not written and stay empty."""
    secrets = {name: os.environ.get(name, "") for name in data["secret_names"]}
    names = {field.name for field in fields(RunPlan)}
    values: dict[str, Any] = {name: value for name, value in data.items() if name in names}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    if values.get("search"):
        values["search"] = SearchPlan(**{**values["search"], "groups": tuple(values["search"]["groups"])})
    values["upstream"] = _upstream(data["upstream"]) if data["upstream"] else None
    return RunPlan(**{**values, "training_config": {}, "definition": {}, "secret_env": secrets})


def _upstream(data: dict[str, Any]) -> UpstreamPlan:
    repos = {name: Repo(**data[name]) for name in ("megatron_bridge", "nemo_run")}
    lists = {"slurm_params": tuple(data["slurm_params"]), "mounted": tuple(Repo(**repo) for repo in data["mounted"])}
    return UpstreamPlan(**{**data, **repos, **lists, "credentials": tuple(data.get("credentials", ()))})


_LONGEST_NAME = 255
_MAX_RANKS = 10**7  # per node or nodes: more than any cluster has, and no sum of it overflows


def _is_inside(path: str) -> str:
    """Return a path below the directory that it is joined to; raise ValueError of any other."""
    parts = path.split("/")
    if PurePosixPath(path).is_absolute() or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError("is not a path inside the directory")
    if len(parts) < 2:
        raise ValueError("is not the path of a run: TEST/POINT/ITERATION")
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
        raise ValueError(f"has a name of more than {_LONGEST_NAME} bytes")
    return path


def _is_encodable(text: str) -> str:
    text.encode()  # raises ValueError of a lone surrogate
    return text


_Text = Annotated[str, AfterValidator(_is_encodable)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Size = Annotated[int, Field(ge=0, le=10**12)]
_Ranks = Annotated[int, Field(ge=1, le=_MAX_RANKS)]


def _part(of: type, required: str = "", **own: Any) -> Any:
    """Return the model of a dataclass as plan.json has it. own: types more specific than the dataclass's."""
    types = {**{name: _as_json(hint) for name, hint in get_type_hints(of).items()}, **own}
    fields: dict[str, Any] = {name: (kind, ... if name in required.split() else None) for name, kind in types.items()}
    config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    return create_model(f"{of.__name__}Part", __config__=config, **fields)


def _as_json(hint: Any) -> Any:
    """Return a field's type in JSON: lists for tuples, tables for mappings, text that can be written."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return Union[tuple(map(_as_json, arguments))]  # noqa: UP007 - built at run time
    if origin is tuple:
        return _list_of(_as_json(arguments[0]))
    if origin is Mapping:
        return dict[arguments]  # type: ignore[misc, valid-type]
    return {str: _Text, int: _Count}.get(hint, hint)


def _list_of(kind: Any) -> Any:
    return list[kind]


class _Args:
    """The arguments that reports calculate with; all others are shown only."""

    gb: int | None
    seq_length: int | None
    launcher: str | None
    gpu_type: str | None
    compute_dtype: str | None


_RepoPart = _part(Repo, "url commit")
_UpstreamPart = _part(
    UpstreamPlan, gpus_per_node=int | None, megatron_bridge=_RepoPart, nemo_run=_RepoPart, mounted=_list_of(_RepoPart)
)
_SearchPart = _part(SearchPlan, "groups", max_trials=Annotated[int, Field(ge=1, le=10**12)] | None)
_RunPart = _part(
    RunPlan,
    "key",
    key=Annotated[_Text, AfterValidator(_is_inside)],
    args=_part(_Args, gb=_Size | None, seq_length=_Size | None),
    num_nodes=_Ranks,
    ranks_per_node=_Ranks,
    array=Annotated[_Text, AfterValidator(lambda path: path and _is_inside(path))],
    upstream=_UpstreamPart | None,
    search=_SearchPart | None,
    secret_names=list[_Text],
)
_ViolationPart = _part(Violation, "rule_id where fact remedy operands message", message=_Text)
_PlanPart = _part(
    ScenarioPlan,
    "scenario runs",
    runs=_list_of(_RunPart),
    rejected=_list_of(_part(RejectedPoint, violations=_list_of(_ViolationPart))),
    left_out=_list_of(_part(LeftOut, "test_id label reason")),
    rule_counts=dict[str, _Count],
    runner=dict[str, Any],
)


def mistake_in_plan(plan: dict[str, Any]) -> str:
    """Return the error in the content of a plan.json, "" if it is valid."""
    try:
        _PlanPart.model_validate(plan)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:200]
        value = "" if first["type"] == "missing" else f" {shown(first['input'])}"
        return f"{where}:{value} {first['msg'].removeprefix('Value error, ')}"
    counts = Counter(run["key"] for run in plan["runs"])
    return next((f"runs: {shown(key)} appears {n} times" for key, n in counts.items() if n > 1), "")
