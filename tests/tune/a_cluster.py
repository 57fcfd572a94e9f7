"""Measured points of a made-up cluster, whose factors on the shipped time model are known. No tests."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from cloudai_mbridge.estimate.architecture import architecture
from cloudai_mbridge.estimate.hardware import Precision, gpu_named
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.time.model import time_model
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.tune.belief import ALL, FACTORS, log_times_of
from cloudai_mbridge.tune.measured import MeasuredPoint

SLOW: Mapping[str, float] = {"compute": 1.4, "memory": 1.5, "links": 3.0, "launches": 2.0, "data_parallel": 2.0}


def measured_points(recipe: str, factors: Mapping[str, float], scatter: float = 0.02) -> list[MeasuredPoint]:
    """Return layouts of a recipe on 8 to 64 GPUs, with times of a cluster of these factors."""
    model = architecture(load_recipe(recipe), ResolvedCmdArgs())
    times = time_model(model, gpu_named("h100"), Precision.BF16)
    layouts = [
        ParallelLayout(num_gpus=num_gpus, mbs=mbs, gbs=128, tp=tp, pp=pp)
        for num_gpus in (8, 64)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4)
        for mbs in (1, 2)
        if num_gpus % (tp * pp) == 0
    ]
    groups = [times.groups(layout) for layout in layouts]
    logs = np.log([factors.get(name, 1.0) for name in FACTORS])
    noise = np.random.default_rng(5).normal(0, scatter, len(groups))
    seconds = np.exp(log_times_of(groups)(logs, ALL)[0] + noise)
    return [MeasuredPoint("h100", each, float(time)) for each, time in zip(groups, seconds, strict=True)]


def spoiled(point: MeasuredPoint, by: float) -> MeasuredPoint:
    """Return a point whose time is wrong."""
    return replace(point, step_time_s=point.step_time_s * by)
