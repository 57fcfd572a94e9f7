"""The belief is what Gaussian arithmetic says, and the search uses it well."""

import numpy as np
import pytest

from cloudai_mbridge.estimate.time.model import StepGroups
from cloudai_mbridge.tune.belief import ALL, FACTORS, SDS, Belief, Room, beliefs, log_times_of
from cloudai_mbridge.tune.search import Search, Trial

DRAW = np.random.default_rng(3)


def some_groups(number: int) -> list[StepGroups]:
    rows = DRAW.uniform(0.01, 1.0, (number, len(FACTORS)))
    return [StepGroups(**dict(zip(FACTORS, row, strict=True)), bubble=float(DRAW.uniform(0, 1))) for row in rows]


def some_positions(number: int) -> np.ndarray:
    return DRAW.integers(0, 4, (number, 3)).astype(float)


def test_without_factors_the_times_are_those_of_the_groups() -> None:
    groups = [StepGroups(1, 2, 3, 4, 0, 5, 6, 0.5), StepGroups(0, 0, 0, 0, 2, 0, 1, 0)]
    assert np.exp(log_times_of(groups)(np.zeros(len(FACTORS)), ALL)[0]) == pytest.approx([10 * 1.5 + 11, 3])


def test_slopes_are_the_derivatives() -> None:
    model, factors = log_times_of(some_groups(6)), DRAW.normal(0, 0.4, len(FACTORS))
    _, slopes = model(factors, ALL)
    for i in range(len(FACTORS)):
        step = np.zeros(len(FACTORS))
        step[i] = 1e-6
        ahead, behind = model(factors + step, ALL)[0], model(factors - step, ALL)[0]
        assert slopes[:, i] == pytest.approx((ahead - behind) / 2e-6, abs=1e-6)


def test_the_posterior_is_that_of_a_gaussian_process() -> None:
    """Of the model linearised where it ends; written out here with all n layouts at once."""
    groups, where = some_groups(8), some_positions(8)
    model = log_times_of(groups)
    belief = Belief(model, where, shared=0.2, own=0.05, noise=0.02, range_=1.5)
    belief.learn(2, 3.0)
    belief.learn(5, 1.5)
    found = belief
    factors = belief._factors(np.array([2, 5]))
    mean, slopes = model(factors, ALL)
    mean = mean - slopes @ factors
    apart = np.square((where[:, None] - where[None]) / 1.5).sum(-1)
    prior = slopes @ np.diag(SDS**2) @ slopes.T + 0.2**2 * np.exp(-apart / 2) + 0.05**2 * np.eye(8)
    seen = [2, 5]
    gain = prior[:, seen] @ np.linalg.inv(prior[np.ix_(seen, seen)] + 0.02**2 * np.eye(2))
    assert found.mean == pytest.approx(mean + gain @ (np.log([3.0, 1.5]) - mean[seen]))
    covariance = prior - gain @ prior[seen]
    assert found.sd == pytest.approx(np.sqrt(np.diag(covariance)))
    chosen = np.array([0, 3, 7])
    draws = np.vstack([some for _, some in found.draws(chosen, 40_000, np.random.default_rng(1))])
    assert draws.mean(axis=1) == pytest.approx(found.mean[chosen], abs=0.02)
    assert np.cov(draws) == pytest.approx(covariance[np.ix_(chosen, chosen)], abs=0.02)


def test_a_measurement_moves_what_it_is_of() -> None:
    belief = Belief(log_times_of(some_groups(5)), some_positions(5))
    before = belief.sd
    belief.learn(1, 2.5)
    after = belief
    assert np.exp(after.mean[1]) == pytest.approx(2.5, rel=0.02)
    assert after.sd[1] < 0.02
    assert (after.sd <= before + 1e-9).all()


def test_factors_are_found_from_few_measurements() -> None:
    groups = some_groups(60)
    truth = np.array([0.5, -0.2, 0.3, 0.6, 1.0, 0.1, 0.2])
    model = log_times_of(groups)
    times = np.exp(model(truth, ALL)[0])
    belief = Belief(model, some_positions(60) * 100, shared=0.01, own=0.01, noise=0.01)
    for index in range(25):
        belief.learn(index, times[index])
    assert np.abs(np.exp(belief.mean) / times - 1).max() < 0.05


def test_out_of_memory_says_where_the_space_ends() -> None:
    room = Room([60, 70, 78, 82, 90], 80)
    before = room.probabilities()
    assert (np.diff(before) < 0).all()
    room.learn(1, fits=False)
    after = room.probabilities()
    assert (after[2:] < 0.01).all()
    assert before[0] > after[0]
    other = Room([60, 70, 78, 82, 90], 80)
    other.learn(3, fits=True)
    assert other.probabilities()[2] > 0.95


def a_search(number: int, room: Room | None = None) -> Search:
    return Search(beliefs(log_times_of(some_groups(number)), some_positions(number)), room)


def test_every_layout_is_tried_once() -> None:
    search = a_search(12)
    while (index := search.next()) is not None:
        search.learn(Trial(index, float(DRAW.uniform(1, 2))))
    assert sorted(trial.index for trial in search.trials) == list(range(12))
    assert search.chance_of_better() == 0


def test_it_goes_on_until_something_has_run() -> None:
    search = a_search(6, Room([70] * 6, 80))
    assert search.best is None
    search.learn(Trial(search.next() or 0, None))
    assert search.best is None
    assert search.chance_of_better() == 1


def test_what_will_not_fit_is_not_tried_first() -> None:
    groups = [StepGroups(1.0, 0, 0, 0, 0, 0, 0, 0), StepGroups(2.0, 0, 0, 0, 0, 0, 0, 0)]
    search = Search(beliefs(log_times_of(groups), np.zeros((2, 1))), Room([160, 40], 80))
    assert search.next() == 1
    search.learn(Trial(1, 2.0))
    assert search.chance_of_better() < 0.05


def test_the_chance_is_small_where_the_others_are_known_to_be_slow() -> None:
    groups = [StepGroups(seconds, 0, 0, 0, 0, 0, 0, 0) for seconds in (1.0, 3.0, 4.0, 5.0)]
    search = Search(beliefs(log_times_of(groups), np.arange(4.0)[:, None]), None)
    assert search.next() == 0
    search.learn(Trial(0, 1.0))
    assert search.chance_of_better() < 0.01


def test_many_unlikely_layouts_count_together() -> None:
    """Each of 5,000 layouts is better with a probability of 0.0002: what a look at the likeliest few would not tell."""
    number, measured = 5020, 20
    groups = [StepGroups(1.0 if i < measured else 1.42, 0, 0, 0, 0, 0, 0, 0) for i in range(number)]
    search = Search(beliefs(log_times_of(groups), 1000.0 * np.arange(number)[:, None]), None)
    for index in range(measured):
        search.learn(Trial(index, 1.0))
    assert search.chance_of_better() > 0.5
