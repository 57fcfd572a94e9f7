"""Nights: what all points of a suite did from night to night."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

import numpy as np

BETWEEN_NIGHTS = timedelta(hours=6)
_ROUNDS = 50


@dataclass(frozen=True)
class NightLevels:
    """began: of each night, when its first run ended (ISO 8601). levels: logarithms. points: their number."""

    began: tuple[str, ...]
    levels: tuple[float, ...]
    points: int


def night_numbers(ended: Sequence[str]) -> np.ndarray:
    """Number the nights: runs between which no pause is longer than six hours are of one. -1: it is not known."""
    moments: dict[int, datetime] = {}
    for i, text in enumerate(ended):
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            continue
        if moment.tzinfo is not None:
            moments[i] = moment
    numbers = np.full(len(ended), -1)
    order = sorted(moments, key=lambda i: moments[i])
    night = 0
    for previous, i in pairwise([order[0], *order] if order else []):
        night += moments[i] - moments[previous] > BETWEEN_NIGHTS
        numbers[i] = night
    return numbers


def night_levels(points: Mapping[str, Sequence[tuple[str, float]]]) -> NightLevels:
    """Return the levels of nights, each point at its own level. points: name -> (when a run ended, logarithm)."""
    runs = [(number, when, value) for number, of in enumerate(points.values()) for when, value in of]
    nights = night_numbers([when for _, when, _ in runs])
    known = nights >= 0
    if not known.any():
        return NightLevels((), (), len(points))
    of_point = np.array([number for number, _, _ in runs])[known]
    values, of_night = np.array([value for _, _, value in runs])[known], nights[known]
    whens = [when for (_, when, _), is_known in zip(runs, known, strict=True) if is_known]
    levels = np.zeros(int(of_night.max()) + 1)
    for _ in range(_ROUNDS):  # least squares of point and night: the one given the other, in turns
        own = _means(values - levels[of_night], of_point, len(points))
        levels = _means(values - own[of_point], of_night, len(levels))
        levels -= levels.mean()
    began = ["" for _ in levels]
    for night, when in sorted(zip(of_night, whens, strict=True), key=lambda pair: datetime.fromisoformat(pair[1])):
        began[night] = began[night] or when
    return NightLevels(tuple(began), tuple(map(float, levels)), len(points))


def _means(values: np.ndarray, groups: np.ndarray, num: int) -> np.ndarray:
    return np.bincount(groups, values, num) / np.maximum(np.bincount(groups, minlength=num), 1)
