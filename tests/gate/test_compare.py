"""Two groups of runs: against SciPy's own tests, and at the edges; and weighted Holm against its definition."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cloudai_mbridge.gate.statistics import Comparison, adjust, compare_groups

OLD, NEW = (1.00, 1.02, 0.99, 1.01, 0.985), (1.03, 1.06, 1.02, 1.05)


def compared(*args: object, **options: object) -> Comparison:
    result = compare_groups(*args, **options)  # type: ignore[arg-type]
    assert isinstance(result, Comparison), result
    return result


def t_tests(old: object, new: object) -> list[tuple[float, float, float]]:
    """Return (p-value, lower bound, upper bound) of Student's and of Welch's test."""
    found = []
    for equal_var in (True, False):
        p_value = stats.ttest_ind(np.log(new), np.log(old), equal_var=equal_var, alternative="greater").pvalue
        bounds = stats.ttest_ind(np.log(new), np.log(old), equal_var=equal_var).confidence_interval(0.90)
        found.append((p_value, math.expm1(bounds.low), math.expm1(bounds.high)))
    return found


@pytest.mark.parametrize(("old", "new"), [(OLD, NEW), (NEW, OLD), ((1.0, 1.1), (1.0, 1.01, 0.99, 1.02, 1.003, 0.98))])
def test_it_is_the_more_doubtful_of_students_and_welchs_tests_of_the_logarithms(old, new):
    found, (students, welchs) = compared(old, new), t_tests(old, new)
    assert found.p_larger == pytest.approx(max(students[0], welchs[0]))
    assert found.lower == pytest.approx(min(students[1], welchs[1]))
    assert found.upper == pytest.approx(max(students[2], welchs[2]))
    assert found.change == pytest.approx(stats.gmean(new) / stats.gmean(old) - 1)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("change", [0.05, 0.37])
def test_a_single_run_has_to_be_off_by_more_than_an_outlier_would_be(swapped, change):
    group, one = np.log(OLD), math.log(1 + change)
    ratio = (one - group.mean()) / (group.std(ddof=1) * math.sqrt(1 + 1 / len(group)))
    expected = max(stats.t.sf(ratio, len(group) - 1), 1 / (1 + ratio**2))
    found = compared([1 + change], OLD) if swapped else compared(OLD, [1 + change])
    assert (found.p_smaller if swapped else found.p_larger) == pytest.approx(expected)
    assert (expected < 0.01) == (change > 0.1)


def test_a_single_run_says_nothing_against_fewer_than_five():
    result = compare_groups(OLD[:4], [2.0])
    assert isinstance(result, str)
    assert "one run against 4" in result


def test_units_do_not_matter():
    seconds, milliseconds = compared(OLD, NEW), compared([1e3 * x for x in OLD], [1e3 * x for x in NEW])
    assert (seconds.change, seconds.p_larger) == pytest.approx((milliseconds.change, milliseconds.p_larger))


def test_one_run_a_side_says_nothing_unless_the_noise_is_assumed():
    assert isinstance(compare_groups([1.0], [1.5]), str)
    found = compared([943.0], [597.0], assumed_noise=0.02)
    assert found.change == pytest.approx(597 / 943 - 1)
    assert found.p_smaller < 1e-9


def test_assumed_noise_never_replaces_noise_that_was_seen():
    assert compared(OLD, NEW, assumed_noise=1e-9) == compared(OLD, NEW)
    assert compared(OLD, [1.05], assumed_noise=1e-9) == compared(OLD, [1.05])


@pytest.mark.parametrize("group", [(1.0, 1.0, 1.0), (1.0, 1.0)])
def test_times_without_any_spread_are_suspicious(group):
    for sides in ((group, NEW), (NEW, group), (group, [1.1])):
        result = compare_groups(*sides)
        assert isinstance(result, str)
        assert "last digit" in result


def test_memory_may_be_the_same_in_every_run_and_a_little_noise_is_believed_in_all_the_same():
    same = compared([10.0] * 5, [10.0] * 5, noise_floor=0.01)
    more = compared([10.0] * 5, [11.0] * 5, noise_floor=0.01)
    expected = stats.t.sf(math.log(1.1) / (0.01 * math.sqrt(2 / 5)), 8)
    assert (same.change, same.p_larger) == (0.0, 0.5)
    assert 0 < same.upper < 0.02
    assert more.p_larger == pytest.approx(expected)


def test_of_what_may_repeat_one_run_says_nothing():
    assert isinstance(compare_groups([10.0] * 5, [11.0], noise_floor=0.01), str)


@pytest.mark.parametrize(
    ("old", "new"), [((1.0, 1.0001), (1.02, 1.0201)), ((1, 1.0001, 1.0002, 1.0003, 1.0004), (1.02,))]
)
def test_few_runs_do_not_make_a_small_spread(old, new):
    """Five runs that have all missed the slow node know nothing of it; a percent of noise is assumed at least."""
    assert compared(old, new).p_larger > 0.05
    assert compared(old, [x * 1.4 for x in new]).p_larger < 0.01


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_positive_number_is_refused(bad):
    for sides in (([1.0, bad], NEW), (OLD, [bad])):
        assert isinstance(compare_groups(*sides), str)
    assert isinstance(compare_groups([], NEW), str)


def test_the_detectable_change_is_detected_in_four_of_five_cases():
    """Plant what a comparison says it would detect, and count. 3 sd of 2,000 draws are 2.7 points."""
    rng, sd, rate = np.random.default_rng(3), 0.01, 0.01
    known = math.sqrt(2 / 5) * sd
    reach = stats.t.ppf(1 - rate, 8) + stats.t.ppf(0.8, 8)
    shift = reach * known
    draws = np.exp(sd * rng.standard_normal((2000, 2, 5)) + np.array([[0.0], [shift]]))
    found = [compared(old.tolist(), new.tolist()).p_larger for old, new in draws]
    assert np.mean(np.array(found) <= rate) == pytest.approx(0.8, abs=0.05)


def closed(p_values: list[float], weights: list[float]) -> list[float]:
    """Adjust by the closed test of weighted Bonferroni tests: the largest p of all intersections with a hypothesis."""
    everything = range(len(p_values))
    subsets = [s for size in range(1, len(p_values) + 1) for s in combinations(everything, size)]
    level = {s: min(1.0, min(p_values[j] * sum(weights[k] for k in s) / weights[j] for j in s)) for s in subsets}
    return [max(level[s] for s in subsets if i in s) for i in everything]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 10)), min_size=1, max_size=6))
def test_weighted_holm_is_the_closed_test(pairs):
    p_values, weights = map(list, zip(*pairs, strict=True))
    assert adjust(p_values, weights) == pytest.approx(closed(p_values, weights))


def test_equal_weights_give_holms_own_procedure():
    assert adjust([0.01, 0.04, 0.03], [1, 1, 1]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjust([], []) == []
