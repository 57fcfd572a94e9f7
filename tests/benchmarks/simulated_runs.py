"""Runs of simulated points, as the gate reads them from reports."""

from typing import Any

import numpy as np

from cloudai_mbridge.gate.runs import RunResult
from cloudai_mbridge.logs import StepRecord

WARMUP = 2
STEPS = 12
STEP_NOISE = 0.002


def noisy_steps(level: float, rng: np.random.Generator) -> np.ndarray:
    """Return the step times of a run in seconds, with little noise of their own."""
    return np.asarray(level * np.exp(STEP_NOISE * rng.standard_normal(STEPS)))


def simulated_run(name: str, times: np.ndarray, *, warmup: int = WARMUP, **facts: Any) -> RunResult:
    """Return a good run with these step times in seconds; facts are further fields of it."""
    steps = tuple(StepRecord(i + 1, float(t), 100.0 / float(t), 6.0 - i / 50, None, 10.0) for i, t in enumerate(times))
    known = {
        "point": "simulated/point",
        "iteration": 0,
        "scenario": "simulated",
        "system": "simulated",
        "verdict": "success",
        "reasons": (),
        "comparability_id": "same",
        "comparability": {},
        "flops_formula": "simulated",
        "flops_per_step": 1.0,
        "tokens_per_step_per_gpu": 1.0,
        "nodes": (),
        "ended_at": "",
        "environment": {},
        "source": "simulated",
    }
    return RunResult(run_id=name, steps=steps, warmup_steps=warmup, num_steps=len(times), **{**known, **facts})
