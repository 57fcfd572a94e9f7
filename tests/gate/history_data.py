"""Make report.json files of schema version 2, as small as the history needs them. No tests."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cloudai_mbridge.report.model import comparability_id, report_digest

START = datetime(2026, 1, 1, tzinfo=UTC)
ENVIRONMENT: Mapping[str, Any] = {
    "device": "GB200",
    "driver": "570.1",
    "cuda": "12.9",
    "nccl": "2.27",
    "python": "3.12",
    "packages": {"torch": "2.7.0"},
    "git": {"commit": "a" * 40, "dirty": False},
    "nodes": ["n1", "n2"],
    "image": {"name": "nemo", "digest": "sha256:1"},
    "repositories": [],
}


def make_point(
    step_time_s: float | None = 1.0,
    *,
    number: int = 0,
    test_id: str = "t",
    label: str = "tp=1",
    verdict: str = "success",
    environment: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    steps: int = 6,
    **more: Any,
) -> dict[str, Any]:
    """Return one run of a report. number: of the run; it ends that many days after START."""
    ended_at = (START + timedelta(days=number)).isoformat()
    job = {"job_id": str(number), "submitted_at": ended_at, "ended_at": ended_at}
    fields = {"test": test_id, "label": label} if fields is None else fields
    return {
        "key": f"{test_id}/{label}/{number}",
        "test_id": test_id,
        "label": label,
        "iteration": number,
        "verdict": verdict,
        "reasons": [] if verdict == "success" else ["it ended early"],
        "num_steps": steps,
        "job": job,
        "attempts": [job],
        "comparability": {"id": comparability_id(fields), "fields": fields},
        "environment": {**ENVIRONMENT, **(environment or {})},
        "metrics": {
            "warmup_steps": 1,
            "flops_formula": "v1",
            "flops_per_step": 1e15,
            "tokens_per_step_per_gpu": 1024.0,
        },
        "steps": [
            {
                "step": i + 1,
                "step_time_s": step_time_s,
                "tflops_per_gpu": None if step_time_s is None else 943.0 / step_time_s,
                "loss": 2.0 - 0.1 * i,
                "peak_memory_gib": 10.0,
            }
            for i in range(steps)
        ],
        **more,
    }


def write_report(path: Path, points: Sequence[Mapping[str, Any]], **more: Any) -> Path:
    """Write a report of these points."""
    report = {
        "schema_version": 2,
        "scenario": "nightly",
        "system": "cluster",
        "created_at": START.isoformat(),
        "points": list(points),
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report))
    return path


def edit_report(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a report that mbridge wrote, and write its digest anew."""
    report = json.loads(path.read_text())
    change(report)
    path.write_text(json.dumps({**report, "digest": report_digest(report)}))
