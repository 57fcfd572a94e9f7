"""What plan.json must look like: the types of what it holds, and run keys that stay inside the run's directory.

A part may be missing, since not every reader needs every part; one that is there has the type that `mbridge` writes.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, create_model

from cloudai_mbridge.constraints import Violation
from cloudai_mbridge.errors import shown
from cloudai_mbridge.megatron_bridge.launcher.plan import Repo, UpstreamPlan
from cloudai_mbridge.plan.run_plan import RejectedPoint, RunPlan, ScenarioPlan

_LONGEST_NAME = 255
_MAX_RANKS = 10**7  # per node or nodes: more than any cluster has, and no sum of it overflows


def _is_inside(path: str) -> str:
    """Return a path that names something below the directory that it is joined to; raise ValueError of any other."""
    parts = path.split("/")
    if PurePosixPath(path).is_absolute() or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError("is not a path inside the directory")
    if len(parts) < 2:
        raise ValueError("is not the path of a run: TEST/POINT/ITERATION")
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
        raise ValueError(f"has a name of more than {_LONGEST_NAME} bytes")
    return path


def _is_empty_or_inside(path: str) -> str:
    return path and _is_inside(path)


def _is_encodable(text: str) -> str:
    text.encode()  # raises ValueError of a lone surrogate
    return text


_Text = Annotated[str, AfterValidator(_is_encodable)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Size = Annotated[int, Field(ge=0, le=10**12)]
_Ranks = Annotated[int, Field(ge=1, le=_MAX_RANKS)]


def _part(of: type, required: str = "", **own: Any) -> Any:
    """Return the model of a dataclass as plan.json has it. own: types that say more than the dataclass's."""
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


@dataclass
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
_RunPart = _part(
    RunPlan,
    "key",
    key=Annotated[_Text, AfterValidator(_is_inside)],
    args=_part(_Args, gb=_Size | None, seq_length=_Size | None),
    num_nodes=_Ranks,
    ranks_per_node=_Ranks,
    array=Annotated[_Text, AfterValidator(_is_empty_or_inside)],
    upstream=_UpstreamPart | None,
    secret_names=list[_Text],
)
_ViolationPart = _part(Violation, "rule_id where fact remedy operands message", message=_Text)
_PlanPart = _part(
    ScenarioPlan,
    "scenario runs",
    runs=_list_of(_RunPart),
    rejected=_list_of(_part(RejectedPoint, violations=_list_of(_ViolationPart))),
    rule_counts=dict[str, _Count],
    runner=dict[str, Any],
)


def mistake_in_plan(plan: dict[str, Any]) -> str:
    """Return what is wrong with the content of a plan.json, "" if nothing is."""
    try:
        _PlanPart.model_validate(plan)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:200]
        value = "" if first["type"] == "missing" else f" {shown(first['input'])}"
        return f"{where}:{value} {first['msg'].removeprefix('Value error, ')}"
    counts = Counter(run["key"] for run in plan["runs"])
    return next((f"runs: {shown(key)} appears {n} times" for key, n in counts.items() if n > 1), "")
