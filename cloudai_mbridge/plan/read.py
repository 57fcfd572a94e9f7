"""Find the directories of runs, and read a plan back, to continue the run."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, create_model

from cloudai_mbridge.constraints import Violation
from cloudai_mbridge.errors import BadInput, Damaged, NothingRan, OtherVersion, counted, shown
from cloudai_mbridge.files.documents import parse_json
from cloudai_mbridge.files.regular import NotRegular, read_regular
from cloudai_mbridge.files.run_files import IS_ROOT_NAME, ROOT_FILES, index_path, recorded_runs, started_at
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.megatron_bridge.launcher_plan import Repo, UpstreamPlan
from cloudai_mbridge.models.scenario import RunnerConfig
from cloudai_mbridge.plan.run_plan import LeftOut, RejectedPoint, RunPlan, ScenarioPlan, SearchPlan

PLAN_VERSION = 2
_AGAIN = "restore the file, or run the scenario again"
LATEST = "latest"
RESULTS_VARIABLE = "MBRIDGE_RESULTS"
_RESULTS = Path("results")  # the default output_path of a system
_MOST_NAMED = 5


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
    mistake = ""
    try:
        _PlanPart.model_validate(plan)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:200]
        value = "" if first["type"] == "missing" else f" {shown(first['input'])}"
        mistake = f"{where}:{value} {first['msg'].removeprefix('Value error, ')}"
    else:
        counts = Counter(run["key"] for run in plan["runs"])
        mistake = next((f"runs: {shown(key)} appears {n} times" for key, n in counts.items() if n > 1), "")
    if mistake:
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
    data, path = read_plan_data(root), root / ROOT_FILES.plan
    try:
        runs = tuple(map(_run, data["runs"]))
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
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        mistakes = error.errors() if isinstance(error, ValidationError) else []
        if mistakes and all(mistake["type"] == "extra_forbidden" for mistake in mistakes):
            names = ", ".join(".".join(map(str, mistake["loc"])) for mistake in mistakes)
            what = f"{path}: has {names}, which this mbridge does not know"
            raise OtherVersion(f"{what}; use the mbridge that wrote it") from None
        reason = shown(f"{type(error).__name__}: {error}")
        raise Damaged(f"{path}: is damaged ({reason}); {_AGAIN}") from None


def _run(data: dict[str, Any]) -> RunPlan:
    """Return a run. Values that only its files need were not written and stay empty."""
    secrets = {name: os.environ.get(name, "") for name in data["secret_names"]}
    names = {field.name for field in fields(RunPlan)}
    values: dict[str, Any] = {name: value for name, value in data.items() if name in names}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    if values.get("search"):
        values["search"] = SearchPlan(**{**values["search"], "groups": tuple(values["search"]["groups"])})
    values["upstream"] = None
    if upstream := data["upstream"]:
        parts = {name: Repo(**upstream[name]) for name in ("megatron_bridge", "nemo_run")}
        lists = {"slurm_params": tuple(upstream["slurm_params"]), "credentials": tuple(upstream.get("credentials", ()))}
        mounted = tuple(Repo(**repo) for repo in upstream["mounted"])
        values["upstream"] = UpstreamPlan(**{**upstream, **parts, **lists, "mounted": mounted})
    return RunPlan(**{**values, "training_config": {}, "definition": {}, "secret_env": secrets})


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
    return _model(of.__name__, required, types)


def _model(name: str, required: str, types: Mapping[str, Any]) -> Any:
    fields: dict[str, Any] = {name: (kind, ... if name in required.split() else None) for name, kind in types.items()}
    config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    return create_model(f"{name}Part", __config__=config, **fields)


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


_RepoPart = _part(Repo, "url commit")
_UpstreamPart = _part(
    UpstreamPlan, gpus_per_node=int | None, megatron_bridge=_RepoPart, nemo_run=_RepoPart, mounted=_list_of(_RepoPart)
)


# The arguments that reports calculate with; all others are shown only
_ARGUMENTS = {
    **dict.fromkeys(("gb", "seq_length"), _Size | None),
    **dict.fromkeys(("launcher", "gpu_type", "compute_dtype"), _Text | None),
}
_SearchPart = _part(SearchPlan, "groups", max_trials=Annotated[int, Field(ge=1, le=10**12)] | None)
_RunPart = _part(
    RunPlan,
    "key",
    key=Annotated[_Text, AfterValidator(_is_inside)],
    args=_model("Args", "", _ARGUMENTS),
    num_nodes=_Ranks,
    ranks_per_node=_Ranks,
    array=Annotated[_Text, AfterValidator(lambda path: path and _is_inside(path))],
    profiled=Annotated[list[_Count], Field(min_length=2, max_length=2)] | None,
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


def find_run(name: str) -> Path:
    """Return the newest run of this user that is not a dry run, or the run whose name begins with `name`.

    A name never refers to another user's run: `resume` executes the files in a directory.

    BadInput: no match, or several.
    """
    runs = find_runs()
    if name == LATEST:
        found = [run for run in runs if _is_own(run)]
        if latest := next((run for run in found if not is_dry_run(run)), None):
            return latest
        dry = f" but {counted(len(found), 'dry run')}" if found else ""
        raise BadInput(f"{LATEST}: you have no runs{dry}; {_where()}")
    found = [run for run in runs if run.name == name] or [run for run in runs if run.name.startswith(name)]
    if found and not (own := [run for run in found if _is_own(run)]):
        raise BadInput(f"{shown(name)}: {visible(str(found[0]))} is another user's run; give its path")
    if not found:
        raise BadInput(f"{shown(name)}: no such path, and no run with this prefix; {_where()}")
    if len(own) > 1:
        what = f"ambiguous: the prefix of {len(own)} runs: {_listed(run.name for run in own)}; give more of the name"
        if len({run.name for run in own}) == 1:
            what = f"{len(own)} runs have this name: {_listed(map(str, own))}; give the path of one"
        raise BadInput(f"{shown(name)}: {what}")
    return own[0]


def _listed(names: Iterable[str]) -> str:
    first, *others = map(visible, names)
    more = [f"and {len(others) - _MOST_NAMED + 1} more"] if len(others) >= _MOST_NAMED else []
    return ", ".join([first, *others[: _MOST_NAMED - 1], *more])


def _where() -> str:
    """Return the searched places and the remedy, as text."""
    places = [f"{visible(place)} ({counted(len(runs), 'run')})" for place, runs in _places()]
    if not os.environ.get(RESULTS_VARIABLE):
        places.append(f"${RESULTS_VARIABLE} (not set)")
    return f"looked in {', '.join(places)}; give the directory that `mbridge run` printed"


def find_runs(directory: Path | None = None) -> list[Path]:
    """Return the directories of runs, newest first: in a directory, or all that a name can refer to.

    BadInput: the directory cannot be read.
    """
    if directory is not None:
        if not os.path.isdir(directory):
            raise BadInput(f"{directory}: no such directory; give one that holds runs")
        found = _runs_in(directory)
    else:
        found = [run for _, runs in _places() for run in runs]
    return sorted(dict.fromkeys(found), key=started_at, reverse=True)


def refuse_distant(root: Path) -> None:
    """Raise BadInput of a run outside ./results and $MBRIDGE_RESULTS: the newest run may be another project's."""
    near = [os.path.realpath(place) for place in (_RESULTS, os.environ.get(RESULTS_VARIABLE)) if place]
    if str(root.parent) not in near:
        raise BadInput(
            f"{LATEST}: is {visible(str(root))}, which is in neither {_RESULTS}/ nor ${RESULTS_VARIABLE}; if you mean"
            " that run, give its path or its name"
        )


def _places() -> Iterator[tuple[str, list[Path]]]:
    """Yield the searched places, with their runs."""
    for directory in (_RESULTS, os.environ.get(RESULTS_VARIABLE)):
        if directory:
            yield os.path.abspath(directory), _runs_in(directory)
    if (index := index_path()) is not None:
        yield str(index), _real_runs(map(str, recorded_runs()))


def _runs_in(directory: str | Path) -> list[Path]:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    return _real_runs(os.path.join(directory, name) for name in names)


def _real_runs(paths: Iterable[str]) -> list[Path]:
    """Return the paths that lead to directories of runs, without links."""
    real = [Path(os.path.realpath(path)) for path in paths if os.path.isdir(path)]
    return [path for path in real if IS_ROOT_NAME.fullmatch(path.name) or os.path.isfile(path / ROOT_FILES.plan)]


def _is_own(root: Path) -> bool:
    try:
        return os.stat(root).st_uid == os.geteuid()
    except OSError:
        return False
