"""A search among the points of a test, each measured by a run: which ones to submit, and when to stop.

It remembers nothing: what was measured is in the journal and in the runs' files, so that another process can go on.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from cloudai_mbridge.estimate.time.groups import StepGroups
from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.report.model import OUT_OF_MEMORY
from cloudai_mbridge.runner import Judge
from cloudai_mbridge.runner.context import Phase, Tracked
from cloudai_mbridge.runner.journal.journal import JournalEntry
from cloudai_mbridge.runner.search import Choice, Chooser
from cloudai_mbridge.tune.belief import Belief, Deviations
from cloudai_mbridge.tune.factors import SDS, FactorModel, Floats
from cloudai_mbridge.tune.room import Room
from cloudai_mbridge.tune.search import CHANCE, WORTH, Search, Trial

# Where nothing is predicted: a level that the first trials tell, and deviations that may be large
FLAT = StepGroups(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
WIDE = Deviations(shared=0.5, own=0.05)
_AT_ONCE = 4  # where no limit on active runs is set
_CATEGORY_APART = 2.0  # doublings that tell as much as another value of what is not a number


def choosers_of(plan: ScenarioPlan, judge: Judge) -> dict[str, Chooser]:
    """Return what chooses among the points of every test that is searched."""
    tests = dict.fromkeys(run.test_id for run in plan.runs if run.search is not None)
    at_once = plan.runner.max_parallel or _AT_ONCE
    return {
        test: PointSearch([run for run in plan.runs if run.test_id == test], judge, at_once=at_once) for test in tests
    }


@dataclass(frozen=True)
class Outcome:
    """Of a point all of whose runs have ended. step_time_s: None where it failed."""

    step_time_s: float | None
    is_out_of_memory: bool = False


class PointSearch:
    """Chooses among the points of one test. at_once: points that may be measured at a time."""

    def __init__(self, plans: Sequence[RunPlan], judge: Judge, at_once: int) -> None:
        self._judge, self._at_once = judge, at_once
        self.points: dict[str, list[RunPlan]] = {}
        for plan in plans:
            self.points.setdefault(plan.label, []).append(plan)
        self._firsts = [runs[0] for runs in self.points.values()]
        self._index = {label: index for index, label in enumerate(self.points)}
        self._where = positions_of([plan.coordinates for plan in self._firsts])
        known = [plan.search for plan in self._firsts if plan.search is not None]
        self._most = next((each.max_trials for each in known), None) or len(self.points)
        groups = [each.groups for each in known]
        self._model = FactorModel([StepGroups(*each) for each in groups]) if all(groups) else None
        shares = [each.memory_share for each in known if each.memory_share]
        self._shares = shares if len(shares) == len(self.points) else None
        self._outcomes: dict[str, Outcome] = {}
        self._last: tuple[object, Choice] | None = None

    def choose(self, runs: Sequence[Tracked], entry_of: Callable[[str], JournalEntry]) -> Choice:
        """Return what to submit now, and why nothing more will be."""
        by_point: dict[str, list[Tracked]] = {}
        for run in runs:
            by_point.setdefault(run.plan.label, []).append(run)
        begun = [label for label, own in by_point.items() if any(_has_begun(run) for run in own)]
        ended = [label for label in begun if all(run.phase is Phase.ENDED for run in by_point[label])]
        state = (tuple(begun), tuple(ended))
        if self._last is None or self._last[0] != state:
            for label in ended:
                if label not in self._outcomes:
                    self._outcomes[label] = self._outcome([run.plan for run in by_point[label]], entry_of)
            self._last = state, self._decide(ended, [label for label in begun if label not in ended])
        return self._last[1]

    def _decide(self, ended: Sequence[str], pending: Sequence[str]) -> Choice:
        search = self.search_after(ended)
        chance = search.chance_of_better() if search.best else 1.0
        of_pending = {run.key for label in pending for run in self.points[label]}
        if chance < CHANCE and search.best is not None:
            best = list(self.points)[search.best.index]
            why = f"with probability {1 - chance:.1%}, none of the others is over {WORTH:.0%} faster than {best}"
            return Choice(of_pending, "" if pending else why)
        num_left = self._most - len(ended) - len(pending)
        if num_left <= 0:
            return Choice(of_pending, "" if pending else f"agent_steps = {self._most} allows no more")
        for label in pending:
            search.assume(self._index[label])
        chosen: list[str] = []
        while len(chosen) < min(num_left, self._at_once - len(pending)) and (index := search.next()) is not None:
            chosen.append(list(self.points)[index])
            search.assume(index)
        return Choice(of_pending | {run.key for label in chosen for run in self.points[label]})

    def search_after(self, ended: Sequence[str]) -> Search:
        """Return the search that has learned from these points."""
        times = [out.step_time_s for label in ended if (out := self._outcomes[label]).step_time_s]
        search = Search(self._belief(times), None if self._shares is None else Room(self._shares, 1.0))
        for label in ended:
            outcome, index = self._outcomes[label], self._index[label]
            if outcome.step_time_s is not None or outcome.is_out_of_memory:
                search.learn(Trial(index, outcome.step_time_s))
            else:
                search.exclude(index)
        return search

    def _belief(self, times: Sequence[float]) -> Belief:
        if self._model is not None:
            return Belief(self._model, self._where)
        level = np.zeros(len(SDS))
        level[0] = fmean(map(math.log, times)) if times else 0.0
        return Belief(FactorModel([FLAT] * len(self.points)), self._where, WIDE, prior=level)

    def _outcome(self, plans: Sequence[RunPlan], entry_of: Callable[[str], JournalEntry]) -> Outcome:
        judgements = [self._judge(plan, entry_of(plan.key)) for plan in plans]
        times = [each.step_time_s for each in judgements if each.is_success and each.step_time_s]
        if len(times) == len(plans):
            return Outcome(fmean(times))
        return Outcome(None, is_out_of_memory=any(each.failure == OUT_OF_MEMORY for each in judgements))


def _has_begun(run: Tracked) -> bool:
    return bool(run.number) or run.phase is not Phase.WAITING


def positions_of(coordinates: Sequence[Mapping[str, Any]]) -> Floats:
    """Return where points are to each other, [points, dimensions]: logarithms to base 2 of numbers; or a place each."""
    names = dict.fromkeys(name for each in coordinates for name in each)
    columns: list[list[float]] = []
    for name in names:
        values = [each.get(name) for each in coordinates]
        if all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values):
            columns.append([math.log2(value) for value in values if value is not None])
            continue
        texts = [repr(value) for value in values]
        apart = _CATEGORY_APART / math.sqrt(2)  # between two places
        columns += [[apart * (text == kind) for text in texts] for kind in dict.fromkeys(texts)]
    return np.array(columns, dtype=float).T.reshape(len(coordinates), len(columns))
