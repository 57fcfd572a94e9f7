"""Reports of the published shape (schema version 2) with made-up numbers, the same ones every time."""

import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import measure
from cloudai_mbridge.report.model import plain

NAMES = ("step_time_s", "tflops_per_gpu", "tokens_per_s_per_gpu")
AXES = {"tp": [1, 2, 4, 8], "pp": [1, 2, 4], "mb": [1, 2, 4, 8], "gb": [256, 512]}


def make_report(points: Sequence[Mapping[str, Any]], **head: Any) -> dict[str, Any]:
    verdicts = dict.fromkeys(("success", "failed", "skipped", "rejected", *(point["verdict"] for point in points)))
    rejected = [point for point in points if point["verdict"] == "rejected"]
    return {
        "schema_version": 3,
        "tool": {"name": "cloudai-mbridge", "version": "0.2.0"},
        "scenario": "gpt_sweep",
        "system": "gb200",
        "created_at": "2026-11-21T11:38:21+00:00",
        "num_rejected": len(rejected),
        "rule_counts": {"C04": len(rejected)} if rejected else {},
        "notes": [],
        "excluded_nodes": {},
        "tests": sorted({point["test_id"] for point in points}),
        "environment": {
            "python": "3.11.9",
            "platform": "Linux-6.8",
            "hostname": "login-1",
            "git": {"commit": "ce238a9", "dirty": False},
            "packages": {"pydantic": "2.11"},
        },
        "summary": {verdict: sum(point["verdict"] == verdict for point in points) for verdict in verdicts},
        "points": list(points),
        **head,
    }


def make_steps(rng: random.Random, time_s: float, num_steps: int) -> list[StepRecord]:
    steps = []
    for step in range(1, num_steps + 1):
        slow = 6.0 if step == 1 else 1.5 if step == 2 else 1.0
        t = time_s * slow * math.exp(rng.gauss(0, 0.015))
        steps.append(StepRecord(step, t, 900.0 / t, 11.0 * step**-0.35 + rng.gauss(0, 0.02), 1.0, 60.0))
    return steps


def make_point(
    label: str,
    coordinates: Mapping[str, Any] | None = None,
    *,
    rng: random.Random | None = None,
    time_s: float = 4.0,
    memory_gib: float | None = 100.0,
    tokens: float = 8192.0,
    num_steps: int = 20,
    test_id: str = "sweep",
    iteration: int = 0,
    node: str = "gb200-1",
    driver: str = "570.86.15",
    predicted: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    """Make a run that succeeded; `changes` replace fields of it."""
    rng = rng or random.Random(label)
    steps = make_steps(rng, time_s, num_steps)
    said: dict[str, Any] = {
        "flops_per_step": 3.6e15,
        "flops_formula": "megatron-bridge/new",
        "memory_kind": "accelerator, reserved",
    }
    metrics = replace(measure(steps, 3, tokens, **said), peak_memory_gib=memory_gib)
    job = {
        "number": 1,
        "job_id": str(rng.randrange(10_000, 99_999)),
        "submitted_at": "2026-11-21T11:00:00+00:00",
        "started_at": "2026-11-21T11:00:01+00:00",
        "ended_at": "2026-11-21T11:10:00+00:00",
        "failure": "",
        "state": "COMPLETED",
        "job_class": "succeeded",
        "exit_code": 0,
        "signal": None,
        "reason": "",
        "nodes": node,
        "run_time_s": 540.0,
        "restarts": 0,
    }
    return {
        "key": f"{test_id}/{label}/{iteration}",
        "test_id": test_id,
        "test_name": "gpt_sweep",
        "label": label,
        "iteration": iteration,
        "coordinates": dict(coordinates or {}),
        "verdict": "success",
        "reasons": [],
        "evidence": [],
        "violations": [],
        "args": {"model_recipe_name": "gpt", "seq_length": 4096, **(coordinates or {})},
        "num_nodes": 1,
        "world_size": 4,
        "num_steps": num_steps,
        "job": job,
        "run": {},
        "log": {"file": f"{test_id}/{label}/{iteration}/stdout.txt", "source": "records", "notes": []},
        "metrics": plain(metrics),
        "steps": plain(steps),
        "failure": None,
        "attempts": [job],
        "is_pre_test": False,
        "comparability": {
            "id": hashlib.sha256(label.encode()).hexdigest()[:16],
            "fields": {"model": "gpt", **(coordinates or {})},
        },
        "environment": {
            "device": "NVIDIA GB200",
            "driver": driver,
            "cuda": "12.8",
            "nccl": "2.26.2",
            "python": "3.12.3",
            "packages": {"torch": "2.13.0", "megatron_core": "0.16.1"},
            "git": None,
            "nodes": [node],
            "image": {"name": "nvcr.io/nvidia/nemo:26.10", "digest": None},
            "repositories": [],
        },
        "predicted": (
            {"step_time_s": time_s * rng.uniform(0.8, 1.15), "tflops_per_gpu": 900 / time_s, "peak_memory_gib": 90.0}
            if predicted
            else None
        ),
        **changes,
    }


def make_search(**changes: Any) -> dict[str, Any]:
    """Make a search of four trials: measured, ended early, out of memory, and the best."""
    rows = (("a", "measured", 2, 4.0), ("<b>", "ended early", 1, 5.5), ("c", "out of memory", 1, None))
    trials = [
        {"label": label, "outcome": outcome, "runs": runs, "step_time_s": seconds, "predicted_step_time_s": 3.0}
        for label, outcome, runs, seconds in (*rows, ("d", "measured", 2, 3.6))
    ]
    return {
        "test_id": "sweep",
        "points": 60,
        "trials": [{**trial, "gpu_hours": 0.5} for trial in trials],
        "best": "d",
        "best_definition": "sweep/d/0/test.toml",
        "step_time_s": 3.6,
        "runner_up": "a",
        "runner_up_s": 4.0,
        "gpu_hours": 2.0,
        "ending": "with probability 97.0%, none of the others is over 2% faster than d",
        **changes,
    }


def make_failed(label: str, coordinates: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Make a run whose loss became NaN at step 8 of 20."""
    fields: dict[str, Any] = {
        "verdict": "failed",
        "reasons": ["The loss or the gradients are NaN or infinite (nan_loss)", "the loss is nan at step 8"],
        "evidence": ["step 8: loss nan", " iteration 8/ 20 | lm loss: nan |"],
        "failure": {
            "id": "nan_loss",
            "kind": "application",
            "title": "The loss or the gradients are NaN or infinite",
            "remedy": "check learning rate, precision and data",
            "evidence": ["step 8: loss nan"],
            "nodes": [],
        },
    }
    point = make_point(label, coordinates, **{**fields, **changes})
    for step in point["steps"][7:]:
        step["loss"] = "nan"
    point["metrics"]["last_loss"] = "nan"
    return point


def make_died(label: str, coordinates: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Make a run that ended before its first step."""
    metrics = dict.fromkeys(NAMES)
    fields: dict[str, Any] = {
        "verdict": "failed",
        "reasons": ["A GPU ran out of memory (out_of_memory)", "exit code 1", "0 of 20 steps are in the log"],
        "evidence": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."],
        "failure": {
            "id": "out_of_memory",
            "kind": "application",
            "title": "A GPU ran out of memory",
            "remedy": "raise tp or pp, lower mb, or recompute activations",
            "evidence": ["stderr.txt:212: torch.OutOfMemoryError: CUDA out of memory."],
            "nodes": [],
        },
        "steps": [],
        "metrics": {"warmup_steps": 3, "window": None, **metrics, "first_loss": None, "last_loss": None},
    }
    return make_point(label, coordinates, **{**fields, **changes})


def make_rejected(label: str, coordinates: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    message = "C04 cmd_args.gb: 100 is not divisible by mb*dp = 8 (mb=2, dp=4); use a multiple of 8"
    violation = {
        "rule_id": "C04",
        "where": "cmd_args.gb",
        "fact": "100 is not divisible by mb*dp = 8",
        "remedy": "use a multiple of 8",
        "operands": {"mb": 2, "dp": 4},
        "message": message,
    }
    empty: dict[str, Any] = {
        "verdict": "rejected",
        "reasons": [message],
        "violations": [violation],
        "args": {},
        "num_nodes": None,
        "world_size": None,
        "num_steps": None,
        "job": {},
        "log": {},
        "metrics": None,
        "steps": [],
        "attempts": [],
        "comparability": None,
        "environment": {},
        "predicted": None,
    }
    point = make_point(label, coordinates)
    point.update(empty | changes)
    return point | {"key": f"{point['test_id']}/{label}"}


def grid(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def make_sweep(
    axes: Mapping[str, Sequence[Any]] = AXES, repeats: int = 1, num_steps: int = 20, most: int | None = None
) -> list[dict[str, Any]]:
    """Make a grid: about a tenth rejected, a few out of memory, one with a NaN; node gb200-3 is 4 % slow."""
    rng = random.Random(7)
    points: list[dict[str, Any]] = []
    for number, coordinates in enumerate(grid(axes)):
        label = "-".join(f"{name}{value}" for name, value in coordinates.items())
        tp, pp, mb = (coordinates.get(name, 1) for name in ("tp", "pp", "mb"))
        if number % 11 == 7:
            points.append(make_rejected(label, coordinates))
            continue
        for iteration in range(repeats):
            node = f"gb200-{(number + iteration) % 6 + 1}"
            slow = 1.04 if node == "gb200-3" else 1.0
            time_s = (
                slow * 4.0 * (1 + 0.09 * math.log2(tp)) * (1 + 0.05 * (pp - 1)) * mb**-0.2 * rng.uniform(0.995, 1.01)
            )
            driver = "565.57.01" if node == "gb200-6" else "570.86.15"
            common: dict[str, Any] = {"iteration": iteration, "node": node, "num_steps": num_steps, "driver": driver}
            if number % 17 == 5:
                points.append(make_died(label, coordinates, **common))
            elif number % 29 == 11:
                points.append(make_failed(label, coordinates, iteration=iteration, node=node))
            else:
                memory = 160.0 * mb**0.35 / tp**0.6 / pp**0.4 * rng.uniform(0.97, 1.03)
                points.append(make_point(label, coordinates, rng=rng, time_s=time_s, memory_gib=memory, **common))
            if len(points) == most:
                return points
    return points


def make_history(point: str = "sweep/tp1-pp1-mb1-gb256", num_runs: int = 30) -> list[dict[str, Any]]:
    """Make a point's history whose level moves at run 20."""
    rng = random.Random(3)
    rows = []
    for run in range(num_runs):
        level = 4.0 if run < 20 else 4.2
        is_change = run == 20
        rows.append(
            {
                "run_id": f"run{run:04d}",
                "point": point,
                "comparability_id": "00112233445566ff",
                "ended_at": f"2026-{10 + run // 28:02d}-{run % 28 + 1:02d}T06:00:00+00:00",
                "commit": f"{run:040x}",
                "values": {"step_time_s": level * rng.uniform(0.99, 1.01), "tflops_per_gpu": 3600 / level},
                "is_change": is_change,
                "words": "step time moved up by 5.0 % at run0020" if is_change else "",
                "about": ["new against the run before: driver 565.57.01 -> 570.86.15"] if is_change else [],
            }
        )
    return rows


def make_gate() -> dict[str, Any]:
    metric = {
        "metric": "step_time_s",
        "verdict": "regression",
        "words": "4.20 s against 4.00 s: 5.0 % more, and at most 1.2 % is noise",
        "unit": "s",
        "decides": True,
        "baseline": 4.0,
        "value": 4.2,
        "change": 0.05,
        "interval": [0.041, 0.059],
        "confidence": 0.99,
        "p_value": 1e-5,
        "adjusted_p": 4e-5,
        "detectable": 0.02,
        "num_runs": 5,
        "num_baseline_runs": 5,
        "waived": "",
    }
    good = {**metric, "metric": "loss_curve", "verdict": "pass", "words": "the curves agree", "unit": ""}
    good.update(baseline=None, value=None, change=None, interval=None)
    return {
        "policy": "conf/gates/nightly.toml",
        "reference": "conf/baselines/gb200.toml",
        "verdict": "regression",
        "points": [
            {"point": "sweep/a", "verdict": "pass", "words": [], "metrics": [good], "runs": ["r1"], "nodes": []},
            {
                "point": "sweep/b",
                "verdict": "regression",
                "words": ["all five runs were slower than any of the baseline"],
                "metrics": [good, metric],
                "runs": ["r1", "r2"],
                "nodes": ["gb200-3"],
            },
            {
                "point": "sweep/c",
                "verdict": "not run",
                "words": ["its run failed"],
                "metrics": [],
                "runs": [],
                "nodes": [],
            },
        ],
        "false_alarm_rate": 0.01,
        "notes": ["one waiver has expired"],
        "headline": "b is 5.0 % slower: 4 -> 4.2 s",
        "environment_changes": {"driver": ["565.57.01", "570.86.15"]},
    }


def make_nodes(number: int = 24, slow: Sequence[int] = (4, 17)) -> dict[str, Any]:
    """Return what `mbridge nodes show --json` says of nodes, of which some are slow and the last ran too little."""
    nodes = [
        {"node": f"gb200-{i:03}", "effect": 0.002, "interval": [-0.006, 0.01], "verdict": "normal", "runs": 4}
        for i in range(1, number)
    ]
    for i in slow:
        nodes[i - 1].update(effect=0.052, interval=[0.044, 0.06], verdict="slow")
    few = {"node": f"gb200-{number:03}", "effect": None, "interval": None, "verdict": "too few runs", "runs": 1}
    return {
        "nodes": sorted([*nodes, few], key=lambda node: node["verdict"] != "slow"),
        "noise": 0.0093,
        "runs": 81,
        "false_alarm_rate": 0.01,
        "slowdown": 0.03,
        "notes": ["2 runs without a known node were left out"],
        "odd": [
            {
                "node": "gb200-004",
                "fact": "governor",
                "value": "powersave",
                "usual": "performance",
                "others": number - 1,
            }
        ],
    }
