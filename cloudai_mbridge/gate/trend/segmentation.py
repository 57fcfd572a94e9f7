"""The best cut of a series into constant pieces: ruptures' solver.

`import ruptures` imports all of scipy.stats, which takes longer than the trend of a million runs. Its solver is a
compiled module that needs nothing of that, and is loaded alone. Where it is not found, ruptures is used as documented.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from cloudai_mbridge.gate.trend.level_fit import Floats

_SOLVER = ("detection", "_detection")


def segment(values: Floats, penalty: float, min_size: int) -> tuple[int, ...]:
    """Return the ends of the pieces that minimise squared distances to their means, plus the penalty of each cut."""
    solve = _solver()
    if solve is None:
        return segment_by_package(values, penalty, min_size)
    previous = solve(values[:, None], penalty, min_size)
    ends, end = [], len(values)
    while end > 0:
        ends.append(end)
        end = int(previous[end])
    return tuple(reversed(ends))


def segment_by_package(values: Floats, penalty: float, min_size: int) -> tuple[int, ...]:
    """Do as `segment` does, with ruptures' public interface."""
    from ruptures.detection import KernelCPD

    search = KernelCPD(kernel="linear", min_size=min_size).fit(values[:, None])
    return tuple(int(end) for end in search.predict(pen=penalty))


@cache
def _solver() -> Callable[..., Any] | None:
    package = importlib.util.find_spec("ruptures")
    for place in package.submodule_search_locations or () if package else ():
        spec = PathFinder.find_spec("ekcpd", [str(Path(place, *_SOLVER))])
        if spec is None or spec.loader is None:
            continue
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError:
            continue
        solve: Callable[..., Any] | None = getattr(module, "ekcpd_pelt_L2", None)
        return solve
    return None
