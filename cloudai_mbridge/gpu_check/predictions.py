"""Predictions of `mbridge estimate` for ten points, next to measurements on the GPU.

Torch's allocator does not count the CUDA context, so it is taken off the predicted memory.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.estimate.memory.estimate import GIB, Assumptions
from cloudai_mbridge.gpu_check.kit import Figures, Kit, PartFailed
from cloudai_mbridge.gpu_check.proxy import RECIPE
from cloudai_mbridge.gpu_check.sweep import Training, speed, train

PREDICTIONS = "predictions"
_MEASURES = ("peak_memory_gib", "step_time_s")
_BASE: dict[str, Any] = {"num_layers": 2, "seq_length": 2048, "mb": 1, "gb": 4, "compute_dtype": "bf16"}
# One size changes at a time, to expose a wrong term of the estimate
POINTS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "layers1": {"num_layers": 1},
    "layers4": {"num_layers": 4},
    "seq1024": {"seq_length": 1024},
    "seq4096": {"seq_length": 4096},
    "mb2": {"mb": 2},
    "mb4": {"mb": 4},
    "gb8": {"gb": 8},
    "hidden2048": {"hidden_size": 2048},
    "recompute": {"recompute_num_layers": 2},
}
STEPS = 7
_CONTEXT_GIB = Assumptions().cuda_context / GIB
_MEMORY = f"reserved by torch's allocator; predicted without the CUDA context of {_CONTEXT_GIB:g} GiB"


def predictions(kit: Kit) -> Figures:
    """Train the ten points; the part fails if a number of any of them could not be compared."""
    trainings = [Training(name, RECIPE, {**_BASE, **sizes}, steps=STEPS) for name, sizes in POINTS.items()]
    found, missing = train(kit, PREDICTIONS, trainings).each(list(POINTS), _row)
    rows = list(found.values())
    errors = {name: [abs(row[name]["error"]) for row in rows if row[name]["error"] is not None] for name in _MEASURES}
    medians = {name: statistics.median(sizes) if sizes else None for name, sizes in errors.items()}
    figures: Figures = {"memory": _MEMORY, "points": rows, "median_absolute_error": medians}
    gaps = [
        f"{row['point']}: {measure} was not {'measured' if row[measure]['predicted'] else 'predicted'}"
        for row in rows
        for measure in _MEASURES
        if row[measure]["error"] is None
    ]
    if missing or gaps:
        raise PartFailed("; ".join(filter(None, [missing, *gaps])), figures)
    return figures


def _row(name: str, point: Figures) -> Figures:
    measured, predicted = speed(point), dict(point.get("predicted") or {})
    if predicted.get("peak_memory_gib"):
        predicted["peak_memory_gib"] -= _CONTEXT_GIB
    row: Figures = {"point": name}
    for measure in _MEASURES:
        ours, theirs = predicted.get(measure), measured[measure]
        row[measure] = {"predicted": ours, "measured": theirs, "error": ours / theirs - 1 if ours and theirs else None}
    return row
