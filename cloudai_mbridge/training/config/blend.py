"""From the `data_path` that users write to the blend that Megatron-Core reads."""

import math
from collections.abc import Sequence

Blend = tuple[list[str], list[float] | None]


def blend_from_data_path(data_path: str | Sequence[str | float]) -> Blend:
    """Turn paths, or weights and paths in turn, into (prefixes, weights); weights are None where none are given.

    A string is split at white space. An odd number of items, or an even one in which no odd position (the first, the
    third, ...) holds a finite number, is a list of paths.

    Raises:
        AssertionError: no path, only some positions for weights hold numbers, a negative weight, or all weights zero.
    """
    items = data_path.split() if isinstance(data_path, str) else list(data_path)
    assert items, "data_path is given and names no dataset: leave it out for mock data"
    weights = [] if len(items) % 2 else [_weight(item) for item in items[::2]]
    if all(weight is None for weight in weights):
        return _prefixes(items), None
    missing = [item for item, weight in zip(items[::2], weights, strict=True) if weight is None]
    assert not missing, (
        f"data_path mixes weights and paths: {missing!r} stand where weights are expected; write a weight before "
        "every path or before none"
    )
    return _prefixes(items[1::2]), _checked([weight for weight in weights if weight is not None])


def _weight(item: str | float) -> float | None:
    try:
        weight = float(item)
    except ValueError:
        return None
    return weight if math.isfinite(weight) else None


def _checked(weights: list[float]) -> list[float]:
    assert min(weights) >= 0 < max(weights), f"data_path weights {weights} must not be negative, nor all zero"
    return weights


def _prefixes(items: Sequence[str | float]) -> list[str]:
    return [str(item).strip() for item in items]
