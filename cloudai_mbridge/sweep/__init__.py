"""From a definition with lists to points with scalars."""

from cloudai_mbridge.sweep.axes import Axis, find_axes
from cloudai_mbridge.sweep.expand import SweepPoint, expand

__all__ = ["Axis", "SweepPoint", "expand", "find_axes"]
