"""Runs for the gate's tests, around a level."""

import math
from collections.abc import Sequence
from typing import Any

from cloudai_mbridge.gate.runs import RunResult
from cloudai_mbridge.logs import StepRecord

NOISE = (0.0, 0.011, -0.008, 0.006, -0.012)  # of five runs, about 1 %
OTHER = (0.004, -0.011, 0.009, -0.002, 0.007)
KEY = {"device": "NVIDIA GB200", "recipe": "gpt", "args.tp": 2}


def run_of(name: str, steps: Sequence[StepRecord], **facts: Any) -> RunResult:
    """Return a good run of these steps; facts are further fields of it."""
    known = {
        "point": "test/point",
        "iteration": 0,
        "scenario": "s",
        "system": "c",
        "verdict": "success",
        "reasons": (),
        "comparability_id": "k1",
        "comparability": KEY,
        "warmup_steps": 2,
        "num_steps": len(steps),
        "flops_formula": "megatron-bridge/new",
        "flops_per_step": 1e12,
        "tokens_per_step_per_gpu": 1000.0,
        "nodes": (),
        "ended_at": "2026-05-01T00:00:00+00:00",
        "environment": {},
        "source": "report.json",
    }
    return RunResult(run_id=name, steps=tuple(steps), **{**known, **facts})


def make_run(
    name: str,
    level: float = 1.0,
    *,
    losses: Sequence[float | None] | None = None,
    steps: int = 12,
    memory: float | None = 10.0,
    **changes: Any,
) -> RunResult:
    """Return a good run of twelve steps around a level."""
    wiggle = [0.004 * math.sin(i + 3 * level) for i in range(steps)]
    curve = [7.0 - 0.1 * i for i in range(steps)] if losses is None else losses
    records = [StepRecord(i + 1, level + w, 100 / (level + w), curve[i], None, memory) for i, w in enumerate(wiggle)]
    environment = {"packages": {"torch": "2.13.0"}, "nodes": [name]}
    facts = {"num_steps": 12, "nodes": (f"node-{name}",), "environment": environment, **changes}
    return run_of(name, records, **facts)


def runs(side: str, noise: Sequence[float], change: float = 0.0, **options: Any) -> list[RunResult]:
    return [make_run(f"{side}{i}", (1 + change) * (1 + n), **options) for i, n in enumerate(noise)]
