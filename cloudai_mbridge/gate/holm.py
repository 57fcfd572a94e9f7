"""Keep the false-alarm rate of many comparisons together below a limit.

Holm's step-down method with weights (Holm, Scandinavian Journal of Statistics 6, 1979): it holds whatever the
correlation of the metrics, which step time and its relatives have.
"""

from collections.abc import Sequence


def adjust(p_values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return adjusted p-values: those at or below the limit are significant together. Weights are positive shares."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i] / weights[i])
    remaining, highest = sum(weights), 0.0
    adjusted = [1.0] * len(p_values)
    for i in order:
        highest = max(highest, min(1.0, p_values[i] * max(remaining / weights[i], 1.0)))
        adjusted[i] = highest
        remaining -= weights[i]
    return adjusted
