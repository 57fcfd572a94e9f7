"""Read what Python configuration code sets, from its syntax tree alone: nothing of the code is imported or run.

An evaluator of a small part of Python. What it cannot know (a value from a library, a call that it cannot follow) is
`UNKNOWN`, and so is everything that depends on it.
"""

from tests.interop.presets.static.evaluate import Evaluator
from tests.interop.presets.static.values import UNKNOWN, Instance, Unsupported

__all__ = ["UNKNOWN", "Evaluator", "Instance", "Unsupported"]
