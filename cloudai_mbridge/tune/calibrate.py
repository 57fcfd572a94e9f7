"""The errors of the time model and the memory model on a cluster: a few factors, fitted to measured points.

The factors are expected to be near 1, and near each other: a cluster that is slow is mostly slow at everything. Few
points therefore move them little apart, and an outlier counts little. They are used only if points that
were held out of the fit are predicted better with them.
"""

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from cloudai_mbridge.errors import BadInput, counted
from cloudai_mbridge.estimate.hardware import FACTORS, LEAST_FACTOR, MOST_FACTOR, FittedFactors, HeldOut, StepFactors
from cloudai_mbridge.tune.belief import ALL, SDS, Floats, LogTimes, log_times_of
from cloudai_mbridge.tune.measured import MeasuredPoint

LEAST_POINTS = 5
# Standard deviations of logarithms: of the common level of all factors, and of a point around the fit
_LEVEL_SD, _SCATTER = 0.5, 0.15
_FOLDS = 10
# Held out, the median error must fall to this share, and so many of the points must be predicted better
_ERROR_SHARE, _BETTER_SHARE = 0.9, 2 / 3
# A peak's prediction is as uncertain as one measurement of it is telling: the factor is shrunk as by one more point
_MEMORY_PRIOR_POINTS = 1


def calibrate(gpu: str, points: Sequence[MeasuredPoint], left_out: Mapping[str, int] | None = None) -> FittedFactors:
    """Fit the factors of a GPU's predictions to measured points; BadInput: there are too few.

    left_out: numbers of other points, by reason.
    """
    if len(points) < LEAST_POINTS:
        raise BadInput(
            f"{counted(len(points), 'measured point')} of {gpu};"
            f" at least {LEAST_POINTS} are needed: measure more layouts"
        )
    log_times = log_times_of([point.groups for point in points])
    logs = np.log([point.step_time_s for point in points])
    held_out = np.abs(np.expm1(_held_out(log_times, logs) - logs))
    shipped = np.abs(np.expm1(log_times(np.zeros(len(FACTORS)), ALL)[0] - logs))
    share = float(np.mean(held_out < shipped))
    error = HeldOut(shipped=float(np.median(shipped)), calibrated=float(np.median(held_out)))
    fitted_error = error.calibrated
    is_better = fitted_error <= _ERROR_SHARE * error.shipped and share >= _BETTER_SHARE
    step_time = StepFactors()
    if is_better:
        fitted = np.exp(_fit(log_times, logs, ALL))
        step_time = StepFactors(**{name: _rounded(value) for name, value in zip(FACTORS, fitted, strict=True)})
    else:
        error = HeldOut(shipped=error.shipped, calibrated=error.shipped)
    peaks = [point.peak_over_predicted for point in points if point.peak_over_predicted is not None]
    return FittedFactors(
        gpu=gpu,
        points=len(points),
        step_time=step_time,
        memory=_memory_factor(peaks),
        held_out=error,
        is_better=is_better,
        left_out=left_out or {},
        memory_points=len(peaks),
        error=fitted_error,
        share_better=share,
    )


def _held_out(log_times: LogTimes, logs: Floats) -> Floats:
    """Return the logarithm of every time as predicted by the other folds."""
    order = np.random.default_rng(0).permutation(len(logs))
    predicted = np.empty(len(logs))
    for fold in range(min(_FOLDS, len(logs))):
        out = order[fold :: min(_FOLDS, len(logs))]
        predicted[out] = log_times(_fit(log_times, logs, np.setdiff1d(order, out)), out)[0]
    return predicted


def _fit(log_times: LogTimes, logs: Floats, chosen: npt.NDArray[np.intp] | slice) -> Floats:
    """Return the most probable logarithms of the factors, given the chosen points."""
    root = np.linalg.inv(np.linalg.cholesky(np.diag(SDS**2) + _LEVEL_SD**2))
    number = len(logs[chosen])

    def residuals(factors: Floats) -> Floats:
        return np.concatenate([(log_times(factors, chosen)[0] - logs[chosen]) / _SCATTER, root @ factors])

    def slopes(factors: Floats) -> Floats:
        return np.concatenate([log_times(factors, chosen)[1] / _SCATTER, root])

    def loss(squares: Floats) -> Floats:
        """Return Cauchy's loss for the points, which may be outliers, and squares for the prior of the factors."""
        rho = np.array([squares, np.ones_like(squares), np.zeros_like(squares)])
        of_points = 1 + squares[:number]
        rho[:, :number] = np.log(of_points), 1 / of_points, -1 / of_points**2
        return rho

    found = least_squares(residuals, np.zeros(len(FACTORS)), jac=slopes, loss=loss)
    return np.asarray(found.x, dtype=np.float64)


def _memory_factor(ratios: Sequence[float]) -> float:
    """Return the factor of the peak: the median of measured over predicted, shrunk to 1."""
    if len(ratios) < LEAST_POINTS:
        return 1.0
    return _rounded(median(ratios) ** (len(ratios) / (len(ratios) + _MEMORY_PRIOR_POINTS)))


def _rounded(value: float) -> float:
    return min(max(float(f"{value:.4g}"), LEAST_FACTOR), MOST_FACTOR)
