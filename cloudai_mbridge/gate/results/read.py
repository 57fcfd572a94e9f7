"""Read the runs of a report.json, for gates, baselines and the history."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import NothingRan
from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import Metrics
from cloudai_mbridge.plan.read import is_dry_run
from cloudai_mbridge.report.model import PointReport, RunReport, comparability_id
from cloudai_mbridge.report.read import read_report
from cloudai_mbridge.verdict import Verdict

SUCCESS = str(Verdict.SUCCESS)


@dataclass(frozen=True)
class RunResult:
    """One finished run.

    run_id: the same whenever the same run is reported again. point: test_id/label, which its repetitions share.
    comparability: facts that must be equal between comparable results; comparability_id is their digest.
    nodes: host names. ended_at: ISO 8601, of the end of its job, or of the report. environment: of its processes.
    hosts: facts of its nodes from its training.
    """

    run_id: str
    point: str
    iteration: int
    scenario: str
    system: str
    verdict: str
    reasons: tuple[str, ...]
    comparability_id: str
    comparability: Mapping[str, Any]
    steps: tuple[StepRecord, ...]
    warmup_steps: int
    num_steps: int | None
    flops_formula: str | None
    flops_per_step: float | None
    tokens_per_step_per_gpu: float | None
    nodes: tuple[str, ...]
    ended_at: str
    environment: Mapping[str, Any]
    source: str
    hosts: Mapping[str, Any] = field(default_factory=dict)
    world_size: int | None = None

    @property
    def is_success(self) -> bool:
        return self.verdict == SUCCESS

    @property
    def counted_steps(self) -> tuple[StepRecord, ...]:
        """The steps after the warm-up."""
        return tuple(step for step in self.steps if step.step > self.warmup_steps)


def read_results(path: Path) -> list[RunResult]:
    """Return the runs of a report.json, or of the report in a run's directory. Rejected points are not runs.

    BadInput as `read_report`.
    """
    return runs_of(*read_report(path))


def runs_of(report: RunReport, file: Path) -> list[RunResult]:
    """Return the runs of a report that was read."""
    ran = [point for point in report.points if point.verdict is not Verdict.REJECTED and not point.is_pre_test]
    return [_run(point, report, str(file)) for point in ran]


def without_dry_runs(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the paths without dry runs, and a note for each dry run.

    NothingRan: all are dry runs.
    """
    dry = [path for path in paths if is_dry_run(path)]
    if dry and len(dry) == len(paths):
        raise NothingRan(
            f"{', '.join(map(str, dry[:5]))}: dry runs only, so there are no results; give a run's directory"
        )
    return [path for path in paths if path not in dry], [f"{path}: skipped, it is a dry run" for path in dry]


def _run(point: PointReport, report: RunReport, source: str) -> RunResult:
    metrics = point.metrics or Metrics(warmup_steps=0)
    key = point.comparability or {"id": "", "fields": {}}
    return RunResult(
        run_id=_run_id(point, report),
        point=f"{point.test_id}/{point.label}",
        iteration=point.iteration,
        scenario=report.scenario,
        system=report.system,
        verdict=str(point.verdict),
        reasons=point.reasons,
        comparability_id=key["id"] if key["id"] == comparability_id(key["fields"]) else "",  # else edited: unknown
        comparability=key["fields"],
        steps=point.steps,
        warmup_steps=metrics.warmup_steps,
        num_steps=point.num_steps,
        flops_formula=metrics.flops_formula,
        flops_per_step=metrics.flops_per_step,
        tokens_per_step_per_gpu=metrics.tokens_per_step_per_gpu,
        nodes=tuple(point.environment.get("nodes") or ()),
        ended_at=str(point.job.get("ended_at") or report.created_at),
        environment=point.environment,
        source=source,
        hosts=_table(_table(point.run.get("environment")).get("hosts")),
        world_size=point.world_size,
    )


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _run_id(point: PointReport, report: RunReport) -> str:
    """Digest the unique properties of a run: its jobs, their submission times, and its measurements.

    The verdict is excluded: a run that is judged again is the same run.
    """
    jobs = [(attempt.get("job_id"), attempt.get("submitted_at")) for attempt in point.attempts]
    steps = [(step.step, step.step_time_s, step.loss) for step in point.steps]
    identity = (report.scenario, report.system, point.key, jobs, steps)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:24]
