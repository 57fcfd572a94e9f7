"""Weighted Holm against its definition: the closed test of weighted Bonferroni tests."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudai_mbridge.gate.statistics import adjust


def closed(p_values: list[float], weights: list[float]) -> list[float]:
    """Adjust by the definition: the largest p-value of all intersections that hold a hypothesis."""
    everything = range(len(p_values))
    subsets = [s for size in range(1, len(p_values) + 1) for s in combinations(everything, size)]
    level = {s: min(1.0, min(p_values[j] * sum(weights[k] for k in s) / weights[j] for j in s)) for s in subsets}
    return [max(level[s] for s in subsets if i in s) for i in everything]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 10)), min_size=1, max_size=6))
def test_it_is_the_closed_test(pairs):
    p_values, weights = map(list, zip(*pairs, strict=True))
    assert adjust(p_values, weights) == pytest.approx(closed(p_values, weights))


def test_equal_weights_give_holms_own_procedure():
    assert adjust([0.01, 0.04, 0.03], [1, 1, 1]) == pytest.approx([0.03, 0.06, 0.06])


def test_nothing_is_nothing():
    assert adjust([], []) == []
