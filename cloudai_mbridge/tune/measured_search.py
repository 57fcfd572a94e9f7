"""A search among the points of a test, each measured by a run: which runs to submit, and when to stop.

It is stateless: measurements are in the journal and in the runs' files, so that another process can continue.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from scipy.special import stdtrit

from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.report.model import OUT_OF_MEMORY
from cloudai_mbridge.runner import Judge
from cloudai_mbridge.runner.context import Choice, Chooser, Phase, Tracked
from cloudai_mbridge.runner.journal import JournalEntry
from cloudai_mbridge.schedulers.interface import ENDED_EARLY
from cloudai_mbridge.tune.belief import Floats, Prior
from cloudai_mbridge.tune.search import CHANCE, WORTH, Search, Trial
from cloudai_mbridge.verdict import Judgement

NOISE = 0.01  # prior standard deviation of the logarithm between runs of a point; it weighs as `_AS_KNOWN` differences
_AS_KNOWN = 2
_CERTAIN = 0.95  # that the best point is faster than the next; otherwise both are measured again, once
_FIRST_LOOK, _LOOKS_PER_DOUBLING, _WRONGLY = 4, 2, 0.001
_LEAST_ERROR = 1e-9
_OF_MEDIAN = math.sqrt(math.pi / 2)  # a median's standard error over that of a mean
_AT_ONCE = 4  # without a limit on active runs
_CATEGORY_APART = 2.0  # doublings equivalent to another value of a setting that is not a number


def choosers_of(plan: ScenarioPlan, judge: Judge) -> dict[str, Chooser]:
    """Return the chooser for every test that is searched."""
    tests = dict.fromkeys(run.test_id for run in plan.runs if run.search is not None)
    at_once = plan.runner.max_parallel or _AT_ONCE
    return {
        test: PointSearch([run for run in plan.runs if run.test_id == test], judge, at_once=at_once) for test in tests
    }


@dataclass(frozen=True)
class _Point:
    """The runs of a point, in the order of the plan; `again`: its repetitions."""

    label: str
    firsts: tuple[Tracked, ...]
    again: tuple[Tracked, ...]

    @property
    def has_begun(self) -> bool:
        return any(run.number or run.phase in (Phase.ACTIVE, Phase.UNSURE) for run in self.firsts)

    @property
    def is_pending(self) -> bool:
        """Whether its first outcome is pending. A point that was ended early needs no further repetition."""
        if any(_is_under_way(run) for run in self.firsts):
            return True
        is_cut = any(_was_ended_early(run) for run in self.firsts)
        return self.has_begun and not is_cut and any(run.phase is Phase.WAITING for run in self.firsts)

    @property
    def is_free(self) -> bool:
        """Whether it can still be tried."""
        return not self.has_begun and any(run.phase is Phase.WAITING for run in self.firsts)

    @property
    def spare(self) -> list[Tracked]:
        """The runs that may measure it again."""
        return [run for run in self.again if run.phase is Phase.WAITING and not run.number]

    @property
    def state(self) -> tuple[object, ...]:
        return tuple((run.phase, run.number) for run in (*self.firsts, *self.again))


class PointSearch:
    """Chooses among the points of one test. at_once: points that may be measured at a time."""

    def __init__(self, plans: Sequence[RunPlan], judge: Judge, at_once: int) -> None:
        self._judge, self._at_once = judge, at_once
        firsts = {plan.label: plan for plan in reversed(plans)}
        self._labels = list(dict.fromkeys(plan.label for plan in plans))
        self._index = {label: index for index, label in enumerate(self._labels)}
        where = positions_of([firsts[label].coordinates for label in self._labels])
        self._prior = Prior.of([firsts[label].search for label in self._labels], where)
        known = [search for label in self._labels if (search := firsts[label].search) is not None]
        self._most = next((each.max_trials for each in known), None) or len(self._labels)
        self._judged: dict[tuple[str, int], Judgement] = {}
        self._outcomes: dict[str, Trial | None] = {}  # of every point that was tried; None if it failed
        self._noise = NOISE
        self._last: tuple[object, Choice] | None = None

    def choose(self, runs: Sequence[Tracked], entry_of: Callable[[str], JournalEntry]) -> Choice:
        """Return the runs to submit now, and why no others will be."""
        points = self._points(runs)
        state = tuple(point.state for point in points)
        if self._last is None or self._last[0] != state:
            self._learn(points, entry_of)
            self._last = state, self._decide(points)
        return self._last[1]

    def why_end(self, run: RunPlan, step_times: Sequence[float]) -> str:
        """Return why a running trial cannot be the best any more; "" if it may."""
        best = self._best()
        if best is None or best == run.label:
            return ""
        outcome = self._outcomes[best]
        if outcome is None or outcome.step_time_s is None or outcome.error is None:
            return ""
        if not is_slower(step_times, outcome.step_time_s, outcome.error, self._noise):
            return ""
        return f"it is slower than {best}, {outcome.step_time_s:.4g} s, after {len(step_times)} measured steps"

    def _points(self, runs: Sequence[Tracked]) -> list[_Point]:
        by_label: dict[str, list[Tracked]] = {label: [] for label in self._labels}
        for run in runs:
            by_label[run.plan.label].append(run)
        return [
            _Point(
                label,
                tuple(run for run in own if not run.plan.is_again),
                tuple(run for run in own if run.plan.is_again),
            )
            for label, own in by_label.items()
        ]

    def _learn(self, points: Sequence[_Point], entry_of: Callable[[str], JournalEntry]) -> None:
        """Update the outcomes of the points that have been tried."""
        measured, cut = dict[str, list[Judgement]](), set[str]()
        for point in points:
            if not point.has_begun or point.is_pending:
                self._outcomes.pop(point.label, None)
                continue
            ended = [run for run in (*point.firsts, *point.again) if run.number and run.phase is Phase.ENDED]
            for run in ended:
                if (run.plan.key, run.number) not in self._judged:
                    self._judged[run.plan.key, run.number] = self._judge(run.plan, entry_of(run.plan.key))
            judged = [self._judged[run.plan.key, run.number] for run in ended]
            both = list(zip(ended, judged, strict=True))
            failed = [each for run, each in both if not (each.is_success or run.plan.is_again)]
            if any(map(_was_ended_early, ended)):
                cut.add(point.label)
            if point.label in cut or not failed:
                counted = [each for run, each in both if each.is_success or _was_ended_early(run)]
                measured[point.label] = [each for each in counted if each.step_time_s]
            is_out_of_memory = any(each.failure == OUT_OF_MEMORY for each in failed)
            self._outcomes[point.label] = Trial(self._index[point.label], None) if is_out_of_memory else None
        self._noise = noise_of([[each.step_time_s or math.nan for each in own] for own in measured.values()])
        for label, own in measured.items():
            if not own:
                continue
            step_time_s = fmean(each.step_time_s or math.nan for each in own)
            squares = [self._noise**2 + (each.step_time_error or 0.0) ** 2 for each in own]
            error = math.sqrt(sum(squares)) / len(squares)
            self._outcomes[label] = Trial(self._index[label], step_time_s, error, is_cut=label in cut)

    def _best(self, but: str = "") -> str | None:
        """Return the label of the fastest point that was run to its end, None without one. but: a label to exclude."""
        done = {
            label: outcome.step_time_s
            for label, outcome in self._outcomes.items()
            if outcome and outcome.step_time_s and not outcome.is_cut and label != but
        }
        return min(done, key=lambda label: done[label], default=None)

    def _decide(self, points: Sequence[_Point]) -> Choice:
        by_label = {point.label: point for point in points}
        pending = [point for point in points if point.is_pending]
        kept = {run.plan.key for point in pending for run in point.firsts}
        kept |= {run.plan.key for point in points for run in point.again if _is_under_way(run)}
        search, best = self._search(self._prior), self._best()
        claims = search if self._prior.is_predicted else self._search(self._prior.for_claims())
        chance = claims.chance_of_better() if best else 1.0  # also of points that a limit leaves untried
        for point in points:
            if not point.has_begun and not point.is_free:
                search.exclude(self._index[point.label])
        if chance < CHANCE and best is not None:
            return self._last_choice(best, chance, kept, by_label, "")
        for point in pending:
            search.assume(self._index[point.label])
        num_left = self._most - sum(point.has_begun for point in points)
        is_limited = any(not (point.has_begun or point.is_free) for point in points)
        every = "no other point may be tried" if is_limited else "every point was tried"
        ending = every if num_left else f"agent_steps = {self._most} allows no more"
        num_left = min(num_left, self._at_once - len(pending))
        while num_left > 0 and (index := search.next()) is not None:
            kept |= {run.plan.key for run in by_label[self._labels[index]].firsts}
            search.assume(index)
            num_left -= 1
        return (
            (kept, "" if kept else ending) if best is None else self._last_choice(best, chance, kept, by_label, ending)
        )

    def _last_choice(
        self, best: str, chance: float, kept: set[str], points: Mapping[str, _Point], ending: str
    ) -> Choice:
        """Return the active runs; else runs that separate the best point from the next; else the ending."""
        if kept:
            return kept, ""
        second = self._best(but=best)
        if second is not None and self._certainty(best, second) <= _CERTAIN:  # the difference is within the noise
            again = [run for label in (best, second) for run in points[label].spare]
            if again:
                return {run.plan.key for run in again}, ""
        return (), f"{ending}; {self._ending(best, chance)}" if ending else self._ending(best, chance)

    def _certainty(self, best: str, second: str) -> float:
        """Return the probability that one point is faster than another."""
        (one, error), (other, other_error) = (
            (trial.step_time_s or math.inf, trial.error or 0.0) if trial else (math.inf, 0.0)
            for trial in (self._outcomes[best], self._outcomes[second])
        )
        return NormalDist().cdf(math.log(other / one) / max(math.hypot(error, other_error), _LEAST_ERROR))

    def _ending(self, best: str, chance: float) -> str:
        """Return what is known about the best point, from measurements and from predictions for this device."""
        basis = "" if self._prior.is_predicted else " (from the measured points alone)"
        text = f"with probability {1 - chance:.1%}{basis}, none of the others is over {WORTH:.0%} faster than {best}"
        second = self._best(but=best)
        if second is None:
            return text
        return f"{text}; with {self._certainty(best, second):.1%}, it is faster than {second}"

    def _search(self, prior: Prior) -> Search:
        """Return the search that has learned from all points that were tried."""
        trials = [trial for trial in self._outcomes.values() if trial is not None]
        measured = {trial.index: trial.step_time_s for trial in trials if trial.step_time_s}
        search = Search(prior.beliefs(measured), prior.room())
        for label, trial in self._outcomes.items():
            if trial is None:
                search.exclude(self._index[label])
            else:
                search.learn(trial)
        return search


def _is_under_way(run: Tracked) -> bool:
    return run.phase in (Phase.ACTIVE, Phase.UNSURE) or (run.number > 0 and run.phase is Phase.WAITING)


def _was_ended_early(run: Tracked) -> bool:
    return run.status is not None and run.status.state == ENDED_EARLY


def noise_of(times: Iterable[Sequence[float]]) -> float:
    """Return the standard deviation of the logarithm between runs of a point.

    times: of the runs of each point. Without repetitions, it is `NOISE`.
    """
    logs = [np.log(own) for own in times if len(own) > 1]
    squares = sum(float(np.square(own - own.mean()).sum()) for own in logs)
    known = sum(len(own) - 1 for own in logs)
    return math.sqrt((_AS_KNOWN * NOISE**2 + squares) / (_AS_KNOWN + known))


def is_slower(step_times: Sequence[float], best_s: float, best_error: float, noise: float) -> bool:
    """Return whether a run that has made these steps is certain to be slower than the best point.

    best_error, noise: standard deviations of logarithms, of the best point's time and between runs. Interim looks
    are after 4, 5, 8, 11, 16, ... steps, each with a Student distribution: of runs as fast as the best, one in 1,000 is
    called slower at each look. The median is compared: occasional long steps do not change it, and it is at most about
    their capped mean; capped means of few steps would be wrong more often.
    """
    if len(step_times) < _FIRST_LOOK:
        return False
    looks = int(_LOOKS_PER_DOUBLING * math.log2(len(step_times) / _FIRST_LOOK))
    number = int(_FIRST_LOOK * 2 ** (looks / _LOOKS_PER_DOUBLING))
    logs = np.log(step_times[:number])
    of_steps = _OF_MEDIAN**2 * float(logs.var(ddof=1)) / number
    variance = of_steps + best_error**2 + noise**2
    degrees = (number - 1) / max(of_steps / variance, 1e-6) ** 2  # by Satterthwaite: only the steps' is unknown
    within = stdtrit(degrees, 1 - _WRONGLY) * math.sqrt(variance)
    return bool(np.median(logs) - within > math.log(best_s))


def positions_of(coordinates: Sequence[Mapping[str, Any]]) -> Floats:
    """Return coordinates of points, [points, dimensions]: logarithms to base 2 of numbers; one-hot for other values."""
    names = dict.fromkeys(name for each in coordinates for name in each)
    columns: list[list[float]] = []
    for name in names:
        values = [each.get(name) for each in coordinates]
        if all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values):
            columns.append([math.log2(value) for value in values if value is not None])
            continue
        texts = [repr(value) for value in values]
        apart = _CATEGORY_APART / math.sqrt(2)  # between two values
        columns += [[apart * (text == kind) for text in texts] for kind in dict.fromkeys(texts)]
    return np.array(columns, dtype=float).T.reshape(len(coordinates), len(columns))
