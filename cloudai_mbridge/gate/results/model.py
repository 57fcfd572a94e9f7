"""Validated parts of a report.json."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, StrictInt

from cloudai_mbridge.plan.run_plan import LeftOut

SUCCESS = "success"
REJECTED = "rejected"
_NOT_FINITE = ("nan", "inf", "-inf")


def _number(value: Any) -> Any:
    """Accept numbers, and the texts for numbers that JSON cannot represent."""
    if isinstance(value, bool) or (isinstance(value, str) and value not in _NOT_FINITE):
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return value


Number = Annotated[float, BeforeValidator(_number)]


@dataclass(frozen=True)
class StepResult:
    """One step; None where the log does not say. A loss that is not finite is a NaN or an infinity here."""

    step: StrictInt
    step_time_s: Number | None
    tflops_per_gpu: Number | None
    loss: Number | None
    peak_memory_gib: Number | None = None
    grad_norm: Number | None = None


class _Lenient(BaseModel):
    """A part of the contract that is read; the rest of it is for others."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class MetricsModel(_Lenient):
    """Definitions of the measures; the measures themselves are read by exports alone."""

    model_config = ConfigDict(extra="allow", frozen=True)

    warmup_steps: StrictInt
    memory_kind: str | None = None
    flops_formula: str | None = None
    flops_per_step: Number | None = None
    tokens_per_step_per_gpu: Number | None = None


class ComparabilityModel(_Lenient):
    id: str
    fields: dict[str, Any]


class EnvironmentModel(_Lenient):
    model_config = ConfigDict(extra="allow", frozen=True)

    nodes: list[str] | None = None


class PointModel(_Lenient):
    key: str
    test_id: str
    label: str
    iteration: StrictInt
    verdict: str
    reasons: list[str]
    num_steps: StrictInt | None
    job: dict[str, Any]
    attempts: list[dict[str, Any]]
    comparability: ComparabilityModel | None
    environment: EnvironmentModel
    metrics: MetricsModel | None
    steps: list[StepResult]
    is_pre_test: bool = False
    num_nodes: StrictInt | None = None
    world_size: StrictInt | None = None
    args: dict[str, Any] = {}
    run: dict[str, Any] = {}
    failure: Any = None
    coordinates: dict[str, Any] = {}


class ReportModel(_Lenient):
    schema_version: StrictInt
    scenario: str
    system: str
    created_at: str
    points: list[PointModel]
    left_out: list[LeftOut] = []


def comparability_id(fields: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the fields' canonical JSON; equal fields give equal digits."""
    return _sha256(fields)[:16]


def report_digest(report: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of a report without its digest, as "sha256:" and 64 digits."""
    return f"sha256:{_sha256({name: value for name, value in report.items() if name != 'digest'})}"


def _sha256(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
