"""Read the runs of a report.json, for gates, baselines and the history."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cloudai_mbridge.errors import BadInput, Damaged, NothingRan
from cloudai_mbridge.files.json_text import parse_json
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.gate.results.model import (
    REJECTED,
    SUCCESS,
    ComparabilityModel,
    MetricsModel,
    PointModel,
    ReportModel,
    StepResult,
    comparability_id,
    report_digest,
)
from cloudai_mbridge.plan import ROOT_FILES
from cloudai_mbridge.plan.read import is_dry_run, read_plan_data, refuse_dry_run
from cloudai_mbridge.runner.lock import no_driver

SUPPORTED_SCHEMA = 3
_OLDER_SCHEMAS = (2,)  # which lack only data that no gate needs


@dataclass(frozen=True)
class RunResult:
    """One finished run.

    run_id: the same whenever the same run is reported again. point: test_id/label, which its repetitions share.
    comparability: what must be equal for two results to be compared; comparability_id is its digest.
    nodes: host names. ended_at: ISO 8601, of the end of its job, or of the report. environment: what it ran on.
    hosts: what its training said of its nodes.
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
    steps: tuple[StepResult, ...]
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
    def counted_steps(self) -> tuple[StepResult, ...]:
        """The steps after the warm-up."""
        return tuple(step for step in self.steps if step.step > self.warmup_steps)


def read_results(path: Path) -> list[RunResult]:
    """Return the runs of a report.json, or of the report in a run's directory. Rejected points are not runs.

    BadInput: the file is missing, not a report, or of another schema version; as `find_report`.
    """
    return runs_of(*read_report(path))


def runs_of(report: ReportModel, file: Path) -> list[RunResult]:
    """Return the runs of a report that was read."""
    ran = [point for point in report.points if point.verdict != REJECTED and not point.is_pre_test]
    return [_run(point, report, str(file)) for point in ran]


def read_report(path: Path) -> tuple[ReportModel, Path]:
    """Return a report.json, or the report in a run's directory, and the file's path; BadInput as `read_results`.

    Damaged: the report's digest does not match its content. Reports of earlier releases have no digest.
    """
    file = find_report(path)
    try:
        data = parse_json(read_regular(file))
        is_edited = isinstance(data, dict) and "digest" in data and data["digest"] != report_digest(data)
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror}); give a report.json or a run's directory") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file}: is not JSON ({error}); give a report.json that mbridge wrote") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version not in (SUPPORTED_SCHEMA, *_OLDER_SCHEMAS):
        raise BadInput(
            f"{file}: schema_version is {version!r}, {SUPPORTED_SCHEMA} is needed; write it again with"
            " `mbridge generate-report --result-dir DIR`"
        )
    if is_edited:
        raise Damaged(
            f"{file}: was edited: its digest does not match its content; write it again with"
            " `mbridge generate-report --result-dir RUN`"
        )
    try:
        return ReportModel.model_validate(data), file
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadInput(f"{file}: {where}: {first['msg']}; the file is not a report that mbridge wrote") from None


def find_report(path: Path) -> Path:
    """Return the report in a run's directory; any other path is returned unchanged.

    InUse: another process has locked the run: its report is not written yet, or out of date.
    NothingRan: a dry run, or a run that submitted nothing.
    BadInput: no report.
    """
    if not path.is_dir():
        return path
    with no_driver(path):
        if (file := path / ROOT_FILES.report).is_file():
            return file
    refuse_dry_run(path, read_plan_data(path))
    raise BadInput(
        f"{path}: has no {ROOT_FILES.report}: its runs have not ended; continue with `mbridge resume {path}`, or write"
        f" it with `mbridge generate-report --result-dir {path}`"
    )


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


def _run(point: PointModel, report: ReportModel, source: str) -> RunResult:
    metrics = point.metrics or MetricsModel(warmup_steps=0)
    comparability = point.comparability or ComparabilityModel(id="", fields={})
    is_digest = comparability.id == comparability_id(comparability.fields)
    return RunResult(
        run_id=_run_id(point, report),
        point=f"{point.test_id}/{point.label}",
        iteration=point.iteration,
        scenario=report.scenario,
        system=report.system,
        verdict=point.verdict,
        reasons=tuple(point.reasons),
        comparability_id=comparability.id if is_digest else "",  # otherwise its fields are unknown
        comparability=comparability.fields,
        steps=tuple(point.steps),
        warmup_steps=metrics.warmup_steps,
        num_steps=point.num_steps,
        flops_formula=metrics.flops_formula,
        flops_per_step=metrics.flops_per_step,
        tokens_per_step_per_gpu=metrics.tokens_per_step_per_gpu,
        nodes=tuple(point.environment.nodes or ()),
        ended_at=str(point.job.get("ended_at") or report.created_at),
        environment=point.environment.model_dump(exclude_unset=True),
        source=source,
        hosts=_table(_table(point.run.get("environment")).get("hosts")),
        world_size=point.world_size,
    )


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _run_id(point: PointModel, report: ReportModel) -> str:
    """Digest the unique properties of a run: its jobs, their submission times, and its measurements.

    The verdict is excluded: a run that is judged again is the same run.
    """
    jobs = [(attempt.get("job_id"), attempt.get("submitted_at")) for attempt in point.attempts]
    steps = [(step.step, step.step_time_s, step.loss) for step in point.steps]
    identity = (report.scenario, report.system, point.key, jobs, steps)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:24]
