"""Assignment of runs to nights."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import pairwise

import numpy as np

_BETWEEN_NIGHTS = timedelta(hours=6)


def night_numbers(ended: Sequence[str]) -> np.ndarray:
    """Return the night number of each run; a pause of more than six hours starts a new night. -1 if unknown."""
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
        night += moments[i] - moments[previous] > _BETWEEN_NIGHTS
        numbers[i] = night
    return numbers
