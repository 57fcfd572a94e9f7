"""What plan.json must look like: the types of what it holds, and run keys that stay inside the run's directory.

A part may be missing, since not every reader needs every part; one that is there has the type that `mbridge` writes.
"""

import os
from collections import Counter
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from cloudai_mbridge.errors import shown

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
_Key = Annotated[_Text, AfterValidator(_is_inside)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Size = Annotated[int, Field(ge=0, le=10**12)]
_Ranks = Annotated[int, Field(ge=1, le=_MAX_RANKS)]


class _FilePart(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class _RepoPart(_FilePart):
    url: _Text
    commit: _Text
    mount_as: _Text = ""


_NO_REPO = _RepoPart(url="", commit="")


class _UpstreamPart(_FilePart):
    args: dict[str, Any] = {}
    overrides: dict[str, str] = {}
    gpus_per_node: int | None = None
    slurm_params: list[_Text] = []
    megatron_bridge: _RepoPart = _NO_REPO
    mounted: list[_RepoPart] = []
    nemo_run: _RepoPart = _NO_REPO
    credentials: list[_Text] = []


class _ArgsPart(_FilePart):
    """The arguments that reports calculate with; all others are shown only."""

    gb: _Size | None = None
    seq_length: _Size | None = None
    launcher: _Text | None = None
    gpu_type: _Text | None = None
    compute_dtype: _Text | None = None


class _RunPart(_FilePart):
    key: _Key
    test_id: _Text = ""
    test_name: _Text = ""
    label: _Text = ""
    iteration: _Count = 0
    coordinates: dict[str, Any] = {}
    args: _ArgsPart = _ArgsPart()
    recipe: _Text = ""
    num_nodes: _Ranks = 1
    ranks_per_node: _Ranks = 1
    num_steps: _Count | None = None
    warmup_steps: _Count = 0
    env: dict[str, str] = {}
    secret_names: list[_Text] = []
    time_limit: _Text | None = None
    time_limit_s: float | None = None
    nodes: list[_Text] = []
    exclude_nodes: list[_Text] = []
    extra_srun_args: _Text = ""
    container_image: _Text = ""
    container_mounts: list[_Text] = []
    after_completion: list[_Text] = []
    after_start: list[_Text] = []
    end_with: list[_Text] = []
    array: Annotated[_Text, AfterValidator(_is_empty_or_inside)] = ""
    array_index: _Count = 0
    is_pre_test: bool = False
    is_gate: bool = False
    profiler: list[_Text] = []
    hang_timeout_s: float | None = None
    upstream: _UpstreamPart | None = None
    predicted: dict[str, Any] | None = None


class _ViolationPart(_FilePart):
    rule_id: _Text
    where: _Text
    fact: _Text
    remedy: _Text
    operands: dict[str, Any]
    message: _Text


class _RejectedPart(_FilePart):
    test_id: _Text = ""
    test_name: _Text = ""
    label: _Text = ""
    coordinates: dict[str, Any] = {}
    violations: list[_ViolationPart] = []


class _PlanPart(_FilePart):
    scenario: _Text
    system: _Text = ""
    dry_run: bool = False
    tests: list[_Text] = []
    runs: list[_RunPart]
    rejected: list[_RejectedPart] = []
    num_rejected: _Count = 0
    rule_counts: dict[str, _Count] = {}
    notes: list[_Text] = []
    runner: dict[str, Any] = {}


def mistake_in_plan(plan: dict[str, Any]) -> str:
    """Return what is wrong with the content of a plan.json, "" if nothing is."""
    try:
        read = _PlanPart.model_validate(plan)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:200]
        value = "" if first["type"] == "missing" else f" {shown(first['input'])}"
        return f"{where}:{value} {first['msg'].removeprefix('Value error, ')}"
    counts = Counter(run.key for run in read.runs)
    return next((f"runs: {shown(key)} appears {n} times" for key, n in counts.items() if n > 1), "")
