"""Records of a run and of its points. `RunReport.to_dict` is the published form: report.json, schema version 3."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from pydantic import StrictBool, StrictInt

from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import Metrics, first_step
from cloudai_mbridge.plan.run_plan import LeftOut
from cloudai_mbridge.rehearsal.record import RehearsalVerdict
from cloudai_mbridge.schedulers.interface import ENDED_EARLY
from cloudai_mbridge.verdict import Verdict

SCHEMA_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class PointReport:
    """One run of a point, or one rejected point.

    key: the run's directory below the root. job: what the scheduler said. run: what the training said of itself.
    failure: what made it fail, by the catalogue of failures. evidence: the lines that show it. last_lines: of its logs.
    attempts: its jobs, of which `job` is the last.
    is_pre_test: it checked a node; its failure excludes the node and does not fail the scenario.
    violations: the broken rules of a rejected point. metrics, steps and environment are empty for it.
    comparability: {"id", "fields"}, what must be equal for two results to be compared; None for a rejected point, and
    where it is not known. environment: what it ran on. predicted: what was expected of it, None if nothing was.
    """

    key: str
    test_id: str
    test_name: str = ""
    label: str
    iteration: StrictInt
    coordinates: Mapping[str, Any] = field(default_factory=dict)
    verdict: Verdict
    reasons: tuple[str, ...]
    evidence: tuple[str, ...] = ()
    last_lines: tuple[str, ...] = ()
    violations: tuple[Mapping[str, Any], ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    num_nodes: StrictInt | None = None
    world_size: StrictInt | None = None
    num_steps: StrictInt | None = None
    job: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    log: Mapping[str, Any] = field(default_factory=dict)
    metrics: Metrics | None = None
    steps: tuple[StepRecord, ...] = ()
    failure: Mapping[str, Any] | None = None
    attempts: tuple[Mapping[str, Any], ...] = ()
    is_pre_test: StrictBool = False
    comparability: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, float | None] | None = None

    @property
    def steps_text(self) -> str:
        """Logged and requested steps, such as "10/10"; a run that goes on from a checkpoint leaves the earlier out."""
        asked = "?" if not self.num_steps else self.num_steps - first_step(self.run, self.steps) + 1
        return f"{len(self.steps)}/{asked}"


TrialOutcome = Literal["measured", "ended early", "out of memory", "failed"]  # early: it was slower than the best


@dataclass(frozen=True)
class TrialReport:
    """A point that a search has tried. runs: of it. step_time_s: the mean of their capped means."""

    label: str
    outcome: TrialOutcome
    runs: int
    step_time_s: float | None
    predicted_step_time_s: float | None
    gpu_hours: float


@dataclass(frozen=True)
class SearchReport:
    """Result of the search among the points of a test.

    points: that broke no rule. trials: in the order in which they were submitted. best, runner_up: labels of the
    fastest two; None where so many did not succeed. best_definition: the best one's test.toml. step_time_s,
    runner_up_s: of these two. gpu_hours: of all trials. ending: why no others were tried; "" if the search is not over.
    """

    test_id: str
    points: int
    trials: tuple[TrialReport, ...]
    best: str | None
    best_definition: str | None
    step_time_s: float | None
    runner_up: str | None
    runner_up_s: float | None
    gpu_hours: float
    ending: str


@dataclass(frozen=True)
class RehearsalReport:
    """Result of the rehearsal of a point before the run; all of it is in rehearsal.json.

    reason: as in `RehearsedPoint`. stack: the software that was asked; "" if none was. is_job_stack: it is the one that
    trains. ranks: those that differ in what they build; built: so many of them. states: parameters of the rank with the
    most, and bytes by kind; {} if none was built.
    """

    test_id: str
    label: str
    verdict: RehearsalVerdict
    reason: str
    stack: str
    is_job_stack: StrictBool
    ranks: StrictInt
    built: StrictInt
    states: Mapping[str, StrictInt]


OUT_OF_MEMORY = "out_of_memory"  # id in the catalogue of failures
_WHERE_ANY = (Verdict.CANCELLED, Verdict.UNFINISHED)


@dataclass(frozen=True)
class RunReport:
    """A whole run of a scenario. Points that a search has not tried are not in it.

    excluded_nodes: name -> why no further job used it. tests: the scenario's, by id, but those of which no point was
    chosen. environment: of the machine that wrote the report. left_out: points that were not chosen. rehearsed: points
    that a rehearsal looked at before the run; empty without one.
    """

    tool_version: str
    scenario: str
    system: str
    created_at: str
    points: tuple[PointReport, ...]
    num_rejected: int = 0
    rule_counts: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    excluded_nodes: Mapping[str, str] = field(default_factory=dict)
    tests: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    searches: tuple[SearchReport, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    rehearsed: tuple[RehearsalReport, ...] = ()

    def count(self, verdict: Verdict) -> int:
        return sum(point.verdict is verdict for point in self.points)

    @property
    def counts(self) -> dict[str, int]:
        """The points by verdict; cancelled and unfinished points only if there are any."""
        counts = {str(verdict): self.count(verdict) for verdict in Verdict}
        return {verdict: n for verdict, n in counts.items() if n or verdict not in _WHERE_ANY}

    @property
    def is_unfinished(self) -> bool:
        """Whether a run has not ended: these are the results so far, which no file contains."""
        return any(point.verdict is Verdict.UNFINISHED for point in self.points)

    @property
    def has_failed(self) -> bool:
        """Whether a run has ended without success, which is no result of a search and no check of a node."""
        good = (Verdict.SUCCESS, Verdict.REJECTED, Verdict.UNFINISHED)
        return any(point.verdict not in good for point in self._deciding())

    def _deciding(self) -> list[PointReport]:
        return [point for point in self.points if not (point.is_pre_test or self.tells_search(point))]

    @property
    def succeeded(self) -> bool:
        """Whether something ran, nothing failed or was left out, and every test has a point that was not rejected.

        A completed search has a best point; its slow or too large trials are results, not failures.
        """
        if self.has_failed or self.is_unfinished or any(search.best is None for search in self.searches):
            return False
        points = self._deciding()
        ran = {point.test_id for point in points if point.verdict is not Verdict.REJECTED}
        return bool(points) and ran >= {point.test_id for point in points} | set(self.tests)

    def tells_search(self, point: PointReport) -> bool:
        """Return whether a trial's failure is a result of the search: the point is slow, or too large."""
        if all(search.test_id != point.test_id for search in self.searches):
            return False
        is_slow = point.verdict is Verdict.CANCELLED and point.job.get("state") == ENDED_EARLY
        is_too_large = point.verdict is Verdict.FAILED and (point.failure or {}).get("id") == OUT_OF_MEMORY
        return is_slow or is_too_large

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with its digest; numbers that are not finite become "nan", "inf" or "-inf"."""
        tool = {"name": "cloudai-mbridge", "version": self.tool_version}
        body = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "tool_version"}
        points = body.pop("points")
        data = {"schema_version": SCHEMA_VERSION, "tool": tool, **body, "summary": self.counts, "points": points}
        report = {name: plain(value) for name, value in data.items()}
        return {**report, "digest": report_digest(report)}


def comparability_id(fields: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the fields' canonical JSON; equal fields give equal digits."""
    return _sha256(fields)[:16]


def report_digest(report: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of a report without its digest, as "sha256:" and 64 digits."""
    return f"sha256:{_sha256({name: value for name, value in report.items() if name != 'digest'})}"


def _sha256(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


_AS_THEY_ARE = (int, bool, type(None))
# Lone surrogates: JSON can contain them, and strict readers refuse them
_SURROGATE = re.compile("[\ud800-\udfff]")


def plain(value: Any) -> Any:
    """Return plain data: dataclasses as objects, and numbers that are not finite as "nan", "inf" or "-inf".

    Lone surrogates in texts are escaped, such as \\ud800.
    """
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if kind in _AS_THEY_ARE:  # most values: a report may have millions
        return value
    if isinstance(value, str):
        return _text(value)
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {_text(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _text(value: str) -> str:
    """Return a text, or the text of an enumeration's member."""
    text = str(value)
    return text if text.isascii() else _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
