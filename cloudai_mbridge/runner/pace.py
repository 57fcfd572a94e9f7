"""How long to wait between two looks at the jobs: short while things change, long while they do not."""

import random
import time
from collections.abc import Callable

_SHARE = 0.1  # of the time since the last change: a change is noticed after at most a tenth more
_COST = 5.0  # a look that took long is a busy controller: wait at least so many times as long
_JITTER = 0.1


class Pace:
    """Intervals between `shortest` and `longest` seconds, with jitter, so that drivers do not march in step."""

    def __init__(self, shortest: float, longest: float, now: Callable[[], float] = time.monotonic) -> None:
        self._shortest, self._longest, self._now = min(shortest, longest), longest, now
        self._changed_at = now()

    def changed(self) -> None:
        """Take note that something was submitted, or has changed."""
        self._changed_at = self._now()

    def interval(self, look_s: float = 0.0) -> float:
        """Return how long to wait after a look that took `look_s`."""
        wanted = max((self._now() - self._changed_at) * _SHARE, look_s * _COST, self._shortest)
        return min(wanted, self._longest) * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311
