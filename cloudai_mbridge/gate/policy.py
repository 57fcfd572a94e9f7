"""Gate policy: reference, error rates, metrics with their limits, waivers. A TOML file."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.gate.runs import METRICS
from cloudai_mbridge.models.base import ExactModel, NotBlank
from cloudai_mbridge.models.loading import validate
from cloudai_mbridge.models.toml_source import TomlSource, read_toml, suggest

LONGEST_WAIVER = timedelta(days=366)
_SHORTEST_REASON = 10
NO_REASON = "<why>"  # for the reader to replace; shorter than any reason, so no waiver takes it
# The same measurement in other units; only such a metric may follow another metric's verdict.
_FOLLOWERS: Mapping[str, str] = {"tflops_per_gpu": "step_time_s", "tokens_per_s_per_gpu": "step_time_s"}


def _known_metric(name: str) -> str:
    if name not in METRICS:
        raise ValueError(f"is not a metric; {suggest(name, list(METRICS))}")
    return name


def _glob_of_metrics(glob: str) -> str:
    if not any(fnmatchcase(name, glob) for name in METRICS):
        raise ValueError(f"matches no metric; {suggest(glob, list(METRICS))}")
    return glob


def _plain_date(value: Any) -> Any:
    if not isinstance(value, date) or isinstance(value, datetime):
        raise ValueError("is not a date; write it without quotes, such as 2026-12-31")
    return value


def _long_enough(text: str) -> str:
    if len(text) < _SHORTEST_REASON:
        raise ValueError(f"is too short a reason; use at least {_SHORTEST_REASON} characters, for who reads it later")
    return text


def matches(glob: str, name: str) -> bool:
    """Return whether a name equals or matches the pattern."""
    return glob == name or fnmatchcase(name, glob)  # a name may itself contain [ or *


PlainDate = Annotated[date, BeforeValidator(_plain_date)]
MetricName = Annotated[str, AfterValidator(_known_metric), Field(json_schema_extra={"enum": list(METRICS)})]
Reason = Annotated[NotBlank, AfterValidator(_long_enough)]


class MetricPolicy(ExactModel):
    """The limits of one metric. Changes are relative: 0.01 is 1 %."""

    name: MetricName = Field(description="one of the gate's metrics")
    weight: float = Field(1.0, gt=0, description="share of the false-alarm rate, in proportion to the others'")
    margin: float = Field(0.01, ge=0, lt=1, description="a change below it is never a regression")
    tolerance: float = Field(
        0.03, gt=0, lt=1, validate_default=True, description="non-inferiority margin of a regression"
    )
    required: bool = Field(
        True, description="whether doubts about it keep a point from passing, and its absence on both sides"
    )
    follows: MetricName | None = Field(
        None, description="the metric whose verdict it shares, by an equal FLOPs formula"
    )

    @field_validator("tolerance")
    @classmethod
    def _above_the_margin(cls, tolerance: float, info: ValidationInfo) -> float:
        margin = info.data.get("margin")
        if margin is not None and not margin < tolerance:
            raise ValueError(f"is the tolerance, and not above the margin of {margin!r}; raise it, or lower the margin")
        return tolerance

    @field_validator("follows")
    @classmethod
    def _follows_its_measurement(cls, follows: str | None, info: ValidationInfo) -> str | None:
        name = info.data.get("name")
        if follows is not None and name is not None and _FOLLOWERS.get(name) != follows:
            allowed = " and ".join(f"{follower} {leader}" for follower, leader in _FOLLOWERS.items())
            raise ValueError(f"does not measure the same as {name}; only {allowed} may follow; remove the key")
        return follows


def default_metrics() -> list[MetricPolicy]:
    """Return the default metrics of a policy."""
    return [
        MetricPolicy(name="step_time_s", weight=0.90),
        MetricPolicy(name="step_time_mean_s", weight=0.05, margin=0.02, tolerance=0.10, required=False),
        MetricPolicy(name="tflops_per_gpu", follows="step_time_s"),
        MetricPolicy(name="loss_curve", weight=0.025, margin=0.005, tolerance=0.02),
        MetricPolicy(name="peak_memory_gib", weight=0.025, margin=0.02, tolerance=0.05, required=False),
    ]


class Waiver(ExactModel):
    """A known regression: up to which size and until when it does not count, by whose decision."""

    point: NotBlank = Field(description="a point, or a pattern such as sweep/tp8-*")
    metric: Annotated[NotBlank, AfterValidator(_glob_of_metrics)] = Field(
        "*", validate_default=True, description="a metric, or a pattern; not all metrics of all points"
    )
    up_to: float = Field(gt=0, le=1, description="the relative change for the worse that is excused, e.g. 0.08")
    reason: Reason = Field(description="why, for who reads it later")
    until: PlainDate = Field(description="the last day on which it has effect")
    by: NotBlank = Field(description="name of the person who decided")

    @field_validator("metric")
    @classmethod
    def _not_everything(cls, metric: str, info: ValidationInfo) -> str:
        point = info.data.get("point")
        if point is not None and set(point) <= set("*?") and all(fnmatchcase(name, metric) for name in METRICS):
            raise ValueError(
                f"waives every metric of every point, as point is {point!r}; name the points or the metric"
            )
        return metric

    def covers(self, point: str, metric: str) -> bool:
        return matches(self.point, point) and matches(self.metric, metric)


class HistoryReference(ExactModel):
    """The last good runs of a history, instead of a baseline."""

    file: NotBlank = Field(description="the history's file, relative to the policy")
    last: int = Field(10, ge=1, description="how many of the last good runs to compare with")


class GatePolicy(ExactModel):
    """A whole policy."""

    name: NotBlank = Field(description="in the report")
    description: str = Field("", description="what the policy is for")
    baseline: NotBlank | None = Field(None, description="a baseline file, relative to the policy; or [history]")
    history: HistoryReference | None = Field(None, description="a history; or `baseline`")
    false_alarm_rate: float = Field(0.01, gt=0, le=0.2, description="probability that no change is called a regression")
    confidence: float = Field(0.95, ge=0.5, lt=1, description="of the bounds of a change, one-sided each")
    min_runs: int = Field(3, ge=1, description="with fewer on a side nothing passes; a regression is still found")
    max_failed_runs: int = Field(0, ge=0, description="failed runs that a point may have")
    assumed_noise: float | None = Field(
        None, gt=0, lt=1, description="relative standard deviation between runs, where neither side has two"
    )
    max_noise: float | None = Field(
        None, gt=0, le=1, description="relative standard deviation between the runs that `baseline promote` takes"
    )
    fail_on_improvement: bool = Field(False, description="let an improvement fail, so that a new baseline is promoted")
    metrics: list[MetricPolicy] = Field(
        default_factory=default_metrics, min_length=1, description="what is looked at, with its limits"
    )
    waivers: list[Waiver] = Field([], description="known regressions, until they are fixed")


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy with the path of its reference: a baseline or a history."""

    path: Path
    policy: GatePolicy
    baseline_path: Path | None
    history_path: Path | None


def is_policy(source: TomlSource) -> bool:
    """Return whether a file is meant as a policy: it has a key that no other kind of file has."""
    if {"test_template_name", "cmd_args"} & set(source.data):
        return False
    own = set(GatePolicy.model_fields) - {"name", "description", "metrics"}
    return bool(own & set(source.data)) or isinstance(source.data.get("metrics"), list)


def load_policy(path: Path, today: date | None = None) -> LoadedPolicy:
    """Read a policy; `today` is for the expiry of waivers.

    BadInput: one line per mistake.
    """
    source = read_toml(path)
    history = source.data.get("history")
    for key in ("nights", "since"):  # keys of earlier releases
        if isinstance(history, Mapping) and key in history:
            raise BadInput(
                f"{source.where(('history', key))}: the keys nights and since are not supported any more; remove them,"
                " find drifts over many nights with `mbridge history trend`, and lower false_alarm_rate for a rate"
                " over many nights"
            )
    policy = validate(GatePolicy, source.data, source)
    if policy.baseline is not None and policy.history is not None:
        raise BadInput(f"{source.where(('history',))}: baseline is set as well; a policy has one of them, remove one")
    if policy.baseline is None and policy.history is None:
        raise BadInput(f"{source.path}: names no reference; set baseline to a file, or write a [history]")
    names = [metric.name for metric in policy.metrics]
    for i, metric in enumerate(policy.metrics):
        if metric.name in names[:i]:
            place = source.where(("metrics", i, "name"))
            raise BadInput(f"{place}: {metric.name!r} appears twice; remove one")
        if metric.follows is not None and metric.follows not in names:
            place = source.where(("metrics", i, "follows"))
            raise BadInput(f"{place}: {metric.follows!r} is not among the metrics; add it, or remove the key")
    if not any(metric.required and metric.follows is None for metric in policy.metrics):
        raise BadInput(
            f"{source.where(('metrics',))}: none is required and decides for itself, so anything would pass;"
            " set required = true for one that follows none"
        )
    for i, waiver in enumerate(policy.waivers):
        if waiver.until > (today or date.today()) + LONGEST_WAIVER:
            place = source.where(("waivers", i, "until"))
            raise BadInput(f"{place}: {waiver.until} is more than a year ahead; waive it for a year at most")
    return LoadedPolicy(
        path,
        policy,
        path.parent / policy.baseline if policy.baseline else None,
        path.parent / policy.history.file if policy.history else None,
    )


def waiver_for(policy: GatePolicy, point: str, metric: str, today: date) -> Waiver | None:
    """Return the active waiver for a metric of a point; of several, the largest limit, then the latest expiry."""
    found = [w for w in policy.waivers if w.until >= today and w.covers(point, metric)]
    return max(found, key=lambda waiver: (waiver.up_to, waiver.until), default=None)


def expired(policy: GatePolicy, today: date) -> tuple[Waiver, ...]:
    """Return the expired waivers."""
    return tuple(waiver for waiver in policy.waivers if waiver.until < today)
