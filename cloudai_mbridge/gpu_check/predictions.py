"""What `mbridge estimate` says of ten points, beside what the GPU measures."""

import statistics
from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.gpu_check.kit import Figures, Kit, PartFailed
from cloudai_mbridge.gpu_check.proxy import RECIPE
from cloudai_mbridge.gpu_check.sweep import Training, speed, train

_MEASURES = ("peak_memory_gib", "step_time_s")
_BASE: dict[str, Any] = {"num_layers": 2, "seq_length": 2048, "mb": 1, "gb": 4, "compute_dtype": "bf16"}
# One size changes at a time, so that a term of the estimate that is off shows
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


def predictions(kit: Kit) -> Figures:
    """Train the ten points; the part fails if fewer than all could be compared."""
    trainings = [Training(name, RECIPE, {**_BASE, **sizes}, steps=STEPS) for name, sizes in POINTS.items()]
    trained = train(kit, "predictions", trainings)
    rows, missing = [], []
    for name in POINTS:
        try:
            rows.append(_row(name, trained.good(name)))
        except PartFailed as error:
            missing.append(str(error))
    figures: Figures = {"points": rows, "median_absolute_error": median_errors(rows)}
    if missing:
        raise PartFailed("; ".join(missing), figures)
    return figures


def _row(name: str, point: Figures) -> Figures:
    measured, predicted = speed(point), point.get("predicted")
    if not predicted:
        raise PartFailed(f"{name}: nothing was predicted")
    row: Figures = {"point": name}
    for measure in _MEASURES:
        row[measure] = {
            "predicted": predicted.get(measure),
            "measured": measured[measure],
            "error": relative_error(predicted.get(measure), measured[measure]),
        }
    return row


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """Return how far the prediction is above the measurement; None where one of them is missing."""
    return predicted / measured - 1 if predicted and measured else None


def median_errors(rows: list[Figures]) -> Figures:
    """Return the median of the absolute errors of each measure."""
    errors = {name: [row[name]["error"] for row in rows if row[name]["error"] is not None] for name in _MEASURES}
    return {name: statistics.median(map(abs, found)) if found else None for name, found in errors.items()}
