"""Build a report from what lies in the directory of a run: plan, journal, logs. The run itself need not be alive."""

import json
import sqlite3
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudai_mbridge import __version__
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.launch.write import PLAN_VERSION
from cloudai_mbridge.logs import read_log
from cloudai_mbridge.logs.tail import last_lines
from cloudai_mbridge.metrics import measure
from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES
from cloudai_mbridge.report.model import PointReport, Report
from cloudai_mbridge.runner.journal import Journal, JournalEntry
from cloudai_mbridge.verdict import Verdict, judge

EVIDENCE_LINES = 15


def build_report(root: Path) -> Report:
    """Read a run's directory.

    Raises:
        BadInput: the directory holds no run.
    """
    plan = _read_plan(root)
    entries = _read_journal(root / ROOT_FILES.journal)
    points = [_report_run(run, entries.get(run["key"]), root) for run in plan["runs"]]
    points += [_report_rejected(point) for point in plan["rejected"]]
    return Report(
        tool_version=__version__,
        scenario=plan["scenario"],
        system=plan["system"],
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        points=tuple(points),
        num_rejected=plan["num_rejected"],
        rule_counts=plan["rule_counts"],
        notes=tuple(plan["notes"]),
    )


def _read_journal(path: Path) -> dict[str, JournalEntry]:
    try:
        journal = Journal(path)
    except sqlite3.DatabaseError as error:
        raise BadInput(f"{path}: is no journal of a run ({error})") from None
    try:
        return journal.entries()
    finally:
        journal.close()


def _read_plan(root: Path) -> dict[str, Any]:
    path = root / ROOT_FILES.plan
    if not path.is_file():
        raise BadInput(
            f"{root}: holds no run ({ROOT_FILES.plan} is missing); give the directory that `mbridge run` named"
        )
    if not (root / ROOT_FILES.journal).is_file():
        raise BadInput(f"{root}: was planned but never run ({ROOT_FILES.journal} is missing)")
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: is damaged ({error})") from None
    if not isinstance(plan, dict) or plan.get("version") != PLAN_VERSION:
        raise BadInput(f"{path}: is no plan of version {PLAN_VERSION}; use the mbridge that made it")
    return plan


def _report_run(run: dict[str, Any], entry: JournalEntry | None, root: Path) -> PointReport:
    directory = root / run["key"]
    is_upstream = run.get("upstream") is not None
    log_name = POINT_FILES.launcher_log if is_upstream else POINT_FILES.stdout
    log = read_log(directory / log_name)
    args, world_size = run["args"], run["num_nodes"] * run["ranks_per_node"]
    metrics = measure(log.steps, run["warmup_steps"], _tokens_per_step_per_gpu(args, world_size))
    evidence = [
        *last_lines(directory / log_name, EVIDENCE_LINES),
        *last_lines(directory / POINT_FILES.stderr, EVIDENCE_LINES),
    ]
    outcome = judge(
        entry.status if entry else None,
        log,
        metrics,
        run["num_steps"] or 0,
        evidence,
        needs_losses=not is_upstream or any(step.loss is not None for step in log.steps),
    )
    return PointReport(
        key=run["key"],
        test_id=run["test_id"],
        test_name=run["test_name"],
        label=run["label"],
        iteration=run["iteration"],
        coordinates=run["coordinates"],
        verdict=outcome.verdict,
        reasons=outcome.reasons,
        evidence=outcome.evidence,
        violations=(),
        args=args,
        num_nodes=run["num_nodes"],
        world_size=world_size,
        num_steps=run["num_steps"],
        job=_job(entry),
        run=log.run,
        log={"file": f"{run['key']}/{log_name}", "source": log.source, "notes": log.notes},
        metrics=metrics,
        steps=log.steps,
    )


def _tokens_per_step_per_gpu(args: dict[str, Any], world_size: int) -> float | None:
    batch, length = args.get("gb"), args.get("seq_length")
    return batch * length / world_size if batch and length else None


def _job(entry: JournalEntry | None) -> dict[str, Any]:
    if entry is None:
        return {}
    status = asdict(entry.status) if entry.status else {}
    return {"job_id": entry.job_id, "submitted_at": entry.submitted_at, "ended_at": entry.ended_at, **status}


def _report_rejected(point: dict[str, Any]) -> PointReport:
    violations = tuple(point["violations"])
    return PointReport(
        key=f"{point['test_id']}/{point['label']}",
        test_id=point["test_id"],
        test_name=point["test_name"],
        label=point["label"],
        iteration=0,
        coordinates=point["coordinates"],
        verdict=Verdict.REJECTED,
        reasons=tuple(violation["message"] for violation in violations),
        evidence=(),
        violations=violations,
        args={},
        num_nodes=None,
        world_size=None,
        num_steps=None,
        job={},
        run={},
        log={},
        metrics=None,
        steps=(),
    )
