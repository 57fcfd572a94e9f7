"""How a report's runs are written into the history: rows, each at most once."""

import hashlib
import json
import math
import re
import sqlite3
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.gate.reference import run_values
from cloudai_mbridge.gate.results import SUPPORTED_SCHEMA, RunResult

_LOGIN = re.compile(r"(?<=//)[^/@\s\"]*@")  # of an address: a user, and maybe a password


def insert_runs(db: sqlite3.Connection, runs: list[tuple[RunResult, str]], digest: str, path: str) -> int:
    """Insert what is not there yet and return the number of runs."""
    scenario, system = (_text(runs[0][0].scenario), _text(runs[0][0].system)) if runs else (None, None)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    db.execute(
        "INSERT INTO reports (sha256, path, imported_at, scenario, system, schema_version) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (sha256) DO NOTHING",
        (digest, _text(path), now, scenario, system, SUPPORTED_SCHEMA),
    )
    report = db.execute("SELECT id FROM reports WHERE sha256 = ?", (digest,)).fetchone()[0]
    return sum(_insert_run(db, run, ended_at, report) for run, ended_at in runs)


def _insert_run(db: sqlite3.Connection, run: RunResult, ended_at: str, report: int) -> bool:
    if db.execute("SELECT 1 FROM runs WHERE run_id = ?", (run.run_id,)).fetchone():
        return False
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
            ended_at,
            _json(run.nodes),
            _commit(run.environment),
            _environment(db, run.environment),
            run.warmup_steps,
            run.num_steps,
            _text(run.flops_formula) if run.flops_formula is not None else None,
            run.flops_per_step,
        ),
    )
    measured = run_values(run).values.items()
    db.executemany(
        "INSERT INTO metrics VALUES (?, ?, ?)",
        [
            (cursor.lastrowid, name, values[0] if len(values) == 1 else _json(values))
            for name, values in measured
            if all(math.isfinite(value) for value in values)
        ],
    )
    return True


def _environment(db: sqlite3.Connection, environment: Mapping[str, Any]) -> int:
    """Return the id of an environment, which most runs share. Nodes are the run's own; logins stay out."""
    fields = _LOGIN.sub("", _json({name: value for name, value in environment.items() if name != "nodes"}))
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


def utc(run: RunResult, path: str) -> str:
    """Return when a run ended such that text sorts as time does. A time without a zone is UTC."""
    try:
        time = datetime.fromisoformat(run.ended_at)
        time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError):
        raise BadInput(
            f"{path}: {run.point}: ended_at: {run.ended_at!r} is no ISO 8601 time; write the report again"
        ) from None
    return time.isoformat(timespec="milliseconds")


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file; nothing of one that cannot be read, which reading it will explain."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return ""


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _text(value: str) -> str:
    """Replace what UTF-8 cannot hold: halves of characters, from JSON escapes or file names."""
    return value.encode("utf-8", errors="replace").decode()
