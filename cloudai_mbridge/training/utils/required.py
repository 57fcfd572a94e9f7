"""Values that a validated configuration has, although their fields may be empty before."""

from typing import TypeVar

T = TypeVar("T")


def required(value: T | None) -> T:
    """Return a value that validation has made sure of."""
    assert value is not None, "the configuration has not been validated"
    return value
