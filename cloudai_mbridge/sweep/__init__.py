"""From a definition with lists to points with scalars."""

from cloudai_mbridge.sweep.axes import Axis, credentials_in_sweep, find_axes
from cloudai_mbridge.sweep.checked import CheckedPoint, checked_points
from cloudai_mbridge.sweep.expand import SweepPoint, SweepSpace, expand

__all__ = [
    "Axis",
    "CheckedPoint",
    "SweepPoint",
    "SweepSpace",
    "checked_points",
    "credentials_in_sweep",
    "expand",
    "find_axes",
]
