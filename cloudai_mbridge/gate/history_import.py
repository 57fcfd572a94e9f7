"""Import of the runs of a report into a history: the runs that it takes, and their rows."""

import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.documents import is_deep
from cloudai_mbridge.files.regular import open_regular, read_chunks
from cloudai_mbridge.gate.history_file import FAILED
from cloudai_mbridge.gate.runs import SUCCESS, RunResult, is_value_of, why_not
from cloudai_mbridge.report.model import SCHEMA_VERSION, comparability_id
from cloudai_mbridge.training.credentials.scrub import without_users

_SLACK = timedelta(days=1)  # of clocks and zones
_LARGEST = 2**63 - 1  # SQLite's largest integer


def take_runs(runs: Iterable[RunResult], path: str) -> tuple[list[RunResult], dict[str, int]]:
    """Return the runs of a report to import, and the number of rejected runs by reason.

    Runs that a gate would exclude are failed. `ended_at` of imported runs is UTC, and its text sorts by time.

    BadInput: an invalid time, a number that is too large, or a table that is nested too deep.
    """
    taken, left_out, now = [], Counter[str](), datetime.now(UTC)
    for run in runs:
        if run.verdict not in (SUCCESS, FAILED):
            left_out[run.verdict] += 1
            continue
        if not run.comparability_id and not run.comparability:
            left_out["without a comparability key"] += 1
            continue
        if comparability_id(run.comparability) != run.comparability_id:
            left_out["whose comparability id is not the digest of its fields"] += 1
            continue
        try:
            time = datetime.fromisoformat(run.ended_at)  # a time without a zone is UTC
            ended_at = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
        except (ValueError, OverflowError):
            raise BadInput(
                f"{path}: {run.point}: ended_at: {run.ended_at!r} is not an ISO 8601 time; write the report again"
            ) from None
        if ended_at > now + _SLACK:
            left_out["that ended more than a day in the future"] += 1
            continue
        for name, number in (("num_steps", run.num_steps or 0), ("warmup_steps", run.warmup_steps)):
            if abs(number) > _LARGEST:
                raise BadInput(f"{path}: {run.point}: {name} has more than 64 bits; write the report again")
        for name, table in (("environment", run.environment), ("comparability", run.comparability)):
            if is_deep(dict(table)):
                raise BadInput(f"{path}: {run.point}: {name} is nested too deep; write the report again")
        if run.is_success and (why := why_not(run)):
            run = replace(run, verdict=FAILED, reasons=(*run.reasons, why))
        taken.append(replace(run, ended_at=ended_at.isoformat(timespec="milliseconds")))
    return taken, dict(left_out)


def insert_report(
    db: sqlite3.Connection,
    runs: Sequence[RunResult],
    taken: Sequence[RunResult],
    digest: str,
    path: str,
    not_chosen: Iterable[str],
) -> int:
    """Insert a report with its points, unless it exists, and return its id.

    not_chosen: points that it left out; the scenario still has them.
    """
    found = db.execute("SELECT id FROM reports WHERE sha256 = ?", (digest,)).fetchone()
    if found:
        return int(found[0])
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    ended_at = max((run.ended_at for run in taken), default=None)
    scenario, system = (_text(runs[0].scenario), _text(runs[0].system)) if runs else (None, None)
    cursor = db.execute(
        "INSERT INTO reports (sha256, path, imported_at, ended_at, scenario, system, schema_version)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (digest, _text(path), now, ended_at, scenario, system, SCHEMA_VERSION),
    )
    db.executemany(
        "INSERT INTO held VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
        [
            *((cursor.lastrowid, run.run_id, _text(run.point)) for run in runs),
            *((cursor.lastrowid, _text(f"left out: {point}"), _text(point)) for point in not_chosen),
        ],
    )
    return int(cursor.lastrowid or 0)


def insert_run(db: sqlite3.Connection, run: RunResult, report: int) -> Literal["added", "known", "rejudged"]:
    """Insert a run unless it exists. A run that failed once stays failed, whatever a later report contains."""
    verdicts = {verdict for (verdict,) in db.execute("SELECT verdict FROM runs WHERE run_id = ?", (run.run_id,))}
    if verdicts & {run.verdict, FAILED}:
        return "known"
    if verdicts:
        db.execute("INSERT INTO withdrawn SELECT id FROM runs WHERE run_id = ?", (run.run_id,))
    db.execute(
        "INSERT INTO keys VALUES (?, ?) ON CONFLICT (id) DO NOTHING",
        (_text(run.comparability_id), _json(run.comparability)),
    )
    cursor = db.execute(
        "INSERT INTO runs (run_id, report, point, scenario, system, key, verdict, reasons, ended_at, nodes, git_commit,"
        " environment, warmup_steps, num_steps, flops_formula, flops_per_step)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            run.run_id,
            report,
            _text(run.point),
            _text(run.scenario),
            _text(run.system),
            _text(run.comparability_id),
            run.verdict,
            _json(run.reasons),
            run.ended_at,
            _json(run.nodes),
            _commit(run.environment),
            _environment(db, run.environment),
            run.warmup_steps,
            run.num_steps,
            _text(run.flops_formula) if run.flops_formula is not None else None,
            run.flops_per_step,
        ),
    )
    measured = run.values.items()
    db.executemany(
        "INSERT INTO metrics VALUES (?, ?, ?)",
        [
            (cursor.lastrowid, name, values[0] if len(values) == 1 else _json(values))
            for name, values in measured
            if is_value_of(name, values)
        ],
    )
    return "rejudged" if verdicts else "added"


def _environment(db: sqlite3.Connection, environment: Mapping[str, Any]) -> int:
    """Return the id of an environment, which most runs share. Nodes are stored per run; logins are removed."""
    fields = without_users(_json({name: value for name, value in environment.items() if name != "nodes"}))
    digest = hashlib.sha256(fields.encode()).hexdigest()
    db.execute(
        "INSERT INTO environments (sha256, fields) VALUES (?, ?) ON CONFLICT (sha256) DO NOTHING", (digest, fields)
    )
    return int(db.execute("SELECT id FROM environments WHERE sha256 = ?", (digest,)).fetchone()[0])


def _commit(environment: Mapping[str, Any]) -> str | None:
    """Return the commit of the run's checkout, else of its first repository."""
    repositories = environment.get("repositories")
    for source in (environment.get("git"), *(repositories if isinstance(repositories, list) else ())):
        if isinstance(source, Mapping) and isinstance(source.get("commit"), str):
            return _text(source["commit"])
    return None


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file; "" if it cannot be read: reading it later raises the error."""
    try:
        with open_regular(file) as opened:
            digest = hashlib.sha256()
            for chunk in read_chunks(opened):  # without the holes of a sparse file
                digest.update(chunk)
            return digest.hexdigest()
    except OSError:
        return ""


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _text(value: str) -> str:
    """Replace lone surrogates, from JSON escapes or file names, which UTF-8 cannot encode."""
    return value.encode("utf-8", errors="replace").decode()
