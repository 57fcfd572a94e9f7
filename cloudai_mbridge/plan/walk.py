"""The points of a test's sweep, with the decision about each, for both `run` and `sweep plan`, one point at a time.

Decided are the order, which points are held back for their memory, and which are beyond the limits of the sweep.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from cloudai_mbridge.constraints import Lifted, RuleSet, Violation
from cloudai_mbridge.errors import BadInput, counted
from cloudai_mbridge.estimate.hardware import Price, price_of
from cloudai_mbridge.estimate.headline import START_UP_S, Headline, MemoryLimit
from cloudai_mbridge.estimate.point import groups_of, guess_of, has_known_error
from cloudai_mbridge.estimate.request import not_considered
from cloudai_mbridge.files.text import readable
from cloudai_mbridge.models.loading import LoadedTest, naming_file
from cloudai_mbridge.models.slurm_values import parse_time_limit
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import TUNE
from cloudai_mbridge.plan.launchers import LAUNCHERS
from cloudai_mbridge.plan.run_plan import SearchPlan
from cloudai_mbridge.plan.select import PointChoice
from cloudai_mbridge.sweep.checked import CheckedPoint, checked_points, informative
from cloudai_mbridge.sweep.estimated import SweepEstimates, largest_terms, memory_violation
from cloudai_mbridge.sweep.expand import SweepSpace
from cloudai_mbridge.sweep.pinned import fill_in_notes, lifted_note, pinned_by
from cloudai_mbridge.training.flops import NEW, Formula

PREDICTED = f"predicted, with {START_UP_S:g} s of start-up a run"
BY_LIMIT = "GPUs x time limit"
_MOST_REASONS = 5


def price_runs(
    where: str,
    headline: Headline | None,
    num_gpus: int,
    num_steps: int | None,
    time_limit_s: float | None,
    num_runs: int,
) -> tuple[float, str]:
    """Return the GPU-hours of a point's runs and the rule: predicted if possible, else by the time limit.

    A run ends at its time limit, regardless of the prediction. where: the test. BadInput: both are missing.
    """
    limit = None if time_limit_s is None else num_gpus * time_limit_s / 3600
    predicted = headline.gpu_hours(num_steps, START_UP_S) if headline else None
    if predicted is not None:
        return num_runs * (predicted if limit is None else min(predicted, limit)), PREDICTED
    if limit is None:
        raise BadInput(f"{where}: sweep.max_gpu_hours needs a time_limit; set one")
    return num_runs * limit, BY_LIMIT


class PointWalk:
    """The points of one test on a system.

    choice: of the points to run, None for all. watched: shows how far the walk is; it gets the points and their number.
    """

    choice: PointChoice | None = None
    watched: Callable[[Iterator[CheckedPoint], int], Iterator[CheckedPoint]] | None = None

    def __init__(
        self,
        test: LoadedTest,
        system: System,
        rules: RuleSet,
        memory_limit: MemoryLimit | None,
        order: str | None = None,
        formula: Formula = NEW,
    ) -> None:
        """rules: whose verdict rules C01-C18 give on points of Megatron-Bridge's launcher.

        order: None takes the sweep's.
        """
        self.test, self._system, self.memory_limit = test, system, memory_limit
        self.test_id, self.limits = test.run.id, test.definition.sweep
        self._order = order or self.limits.order
        self.sweep = SweepSpace(test.definition, test.run)
        self.pinned = pinned_by(test.definition, system, rules)
        extra = test.definition.extra_cmd_args
        self.estimates = SweepEstimates(self.sweep, system, extra, formula, self.pinned)
        self._where, self._gpu_hours, self._rules = f"test {self.test_id!r}", 0.0, Counter[str]()
        self._base = self.sweep.base_args()
        self.runs_per_point = test.run.iterations * self.limits.repeats
        self.not_considered = not_considered(self._base, extra, self.sweep.grid.names)
        self._is_checked = False
        self._price_of = cache(partial(price_of, system))

    @property
    def size(self) -> int:
        """The number of points before exclusion."""
        return self.sweep.grid.size + len(self.limits.include)

    @property
    def axes(self) -> dict[str, list[Any]]:
        """The values of each axis, with those of the included points."""
        values = {name: list(each) for name, each in self.sweep.axes.items()}
        for pattern in self.limits.include:
            for name, value in pattern.items():
                values.setdefault(name, []).append(value)
        return values

    def __iter__(self) -> Iterator[CheckedPoint]:
        """Yield every point with its decision, in order. The first point that does not fit ends what is run."""
        num_run, beyond = 0, ""

        def points() -> Iterator[CheckedPoint]:
            checked = checked_points(self.sweep, self._system, self.pinned)
            return checked if self.watched is None else self.watched(checked, self.size)

        def speed(point: CheckedPoint) -> float | None:
            headline = self.estimates.of(point)
            return None if headline.exceeds(self.memory_limit) else headline.tokens_per_s_per_gpu or 0.0

        for point in informative(points, speed) if self._order == "informative" else points():
            self._judge(point)
            if point.is_run:
                beyond = beyond or self._limit_before(point, num_run)
                num_run += not beyond
                point.beyond = beyond
            yield point

    def _judge(self, point: CheckedPoint) -> None:
        """Decide about a point alone, whatever the limits of the sweep leave of the others."""
        if not point.violations:
            point.headline = self.estimates.of(point)
            point.is_held_back = point.headline.exceeds(self.memory_limit)

    def search_plan(self, point: CheckedPoint) -> SearchPlan:
        """Return a search's prior data on a point."""
        headline = self.estimates.of(point)
        request = self.estimates.request(point)
        guessed = guess_of(request)
        try:
            groups = tuple(groups_of(guessed or request))
        except BadInput:
            groups = ()
        is_calibrated = request.gpu is not None and request.gpu.measured is not None
        peak, given = headline.peak_memory_gib, headline.gpu_memory_gib
        share = peak / given if peak and given else None
        is_guess = guessed is not None or not has_known_error(request)
        return SearchPlan(
            groups, share, self.test.definition.agent_steps, is_calibrated=is_calibrated, is_guess=is_guess
        )

    def memory_violation(self, point: CheckedPoint) -> Violation:
        """Return why a point is held back."""
        assert self.memory_limit is not None  # else none is
        request = self.estimates.request(point)
        return memory_violation(self.estimates.of(point), self.memory_limit.share, request)

    def _limit_before(self, point: CheckedPoint, num_run: int) -> str:
        """Return the limit that a point would exceed; "" if it is within all of them, and its cost is added."""
        if num_run == self.limits.max_points:
            return f"max_points = {num_run}"
        if self.limits.max_gpu_hours is None:
            return ""
        assert point.headline is not None  # no other point is priced
        limit = parse_time_limit(self.test.run.time_limit or self.estimates.value(point, "time_limit"))
        launcher = LAUNCHERS[self.estimates.value(point, "launcher")]
        is_known = "max_steps" in point.coordinates or launcher.knows_steps(self._base, self.test.run)
        num_steps = self.estimates.num_steps(point) if is_known else None
        headline, num_runs = point.headline, self.runs_per_point
        hours, rule = price_runs(self._where, headline, headline.num_gpus, num_steps, limit, num_runs)
        if self._gpu_hours + hours > self.limits.max_gpu_hours:
            return f"max_gpu_hours = {self.limits.max_gpu_hours:g}"
        self._gpu_hours += hours
        self._rules[rule] += 1
        return ""

    def points(self) -> Iterator[CheckedPoint]:
        """Yield every point, in order, with its needs, and why it is not chosen."""
        for point in self:
            self._add_needs(point)
            if self.choice is not None:
                is_held_back = point.is_held_back and self.limits.memory_share is not None
                point.left_out = self.choice.why_not(
                    self.test_id,
                    point.label,
                    point.coordinates,
                    is_rejected=point.headline is None or is_held_back or bool(point.beyond),
                    is_searched=self.test.definition.agent == TUNE,
                )
            yield point

    def preview(self, point: CheckedPoint) -> None:
        """Judge a point alone, with its needs, whatever the limits of the sweep leave of the others."""
        self._judge(point)
        self._add_needs(point)

    def _add_needs(self, point: CheckedPoint) -> None:
        if (headline := point.headline) is None:
            return
        if not self._is_checked:  # as `mbridge run` checks the training configuration, once
            self._is_checked = True
            _, args, recipe = point.resolve()
            LAUNCHERS[args.launcher].training(self.test, args, recipe, self._system)
        if (hours := headline.gpu_hours(self.estimates.num_steps(point))) is not None:
            point.gpu_hours = hours * self.runs_per_point
            price = self.price(headline)[0]
            point.cost = price.per_gpu_hour * point.gpu_hours if price else None

    def price(self, headline: Headline) -> tuple[Price | None, str]:
        """Return the price of a point's GPU, or why it is missing."""
        return self._price_of(headline.gpu or "")

    def terms(self, point: CheckedPoint) -> str:
        """Return the largest terms of a point's fullest stage."""
        return largest_terms(self.estimates.request(point))

    def budget_note(self) -> str | None:
        """Return how the included points were priced; None without a budget or a prediction."""
        if self.limits.max_gpu_hours is None or not self._rules[PREDICTED]:
            return None
        counts = "; ".join(f"{counted(count, 'point')}: {rule}" for rule, count in sorted(self._rules.items()))
        return f"{self._where}: max_gpu_hours counts {readable(self._gpu_hours)} GPU-hours ({counts})"


@dataclass
class SweepSummary:
    """Counts over all points of one test; totals over those that would run. why: reasons why nothing is predicted.

    not_considered: what is set and no prediction reads. run_holds_back: `mbridge run` has a limit of memory, too.
    fill_in: what the launcher fills in. lifted: accepted points by what CloudAI has against them.
    causes: rejected points by rule and what a preset set. unknown: accepted points by what E14 could not check.
    left_out: accepted points that were not chosen. within_limits: accepted points, chosen or not, that a limit allows.
    is_by_time: the examples are the fastest accepted points, by predicted tokens per second and GPU: by the step time,
    where all have the same batch and GPUs; else they are the first.
    """

    test_id: str
    axes: dict[str, int]
    memory_limit: MemoryLimit | None = None
    is_by_time: bool = False
    points: int = 0
    accepted: int = 0
    held_back: int = 0
    would_run: int = 0
    left_out: int = 0
    within_limits: int = 0
    predicted: int = 0
    gpu_hours: float = 0.0
    cost: float | None = None
    priced: int = 0
    currency: str = ""
    why_no_cost: str = ""
    budget_note: str | None = None
    not_considered: tuple[str, ...] = ()
    run_holds_back: bool = False
    fill_in: tuple[str, ...] = ()
    lifted: Counter[Lifted] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    causes: Counter[tuple[str, str]] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)
    examples: list[CheckedPoint] = field(default_factory=list)
    held_examples: list[tuple[CheckedPoint, str]] = field(default_factory=list)

    def lifted_notes(self) -> Iterator[str]:
        """Yield the notes on points that only CloudAI rejects."""
        return (lifted_note(lifted, count) for lifted, count in self.lifted.items())

    def add(self, found: CheckedPoint, walk: PointWalk, examples: int) -> None:
        """Add a point to the counts."""
        self.points += 1
        if found.headline is None:
            # Once a point, in the order of the rules: that of a set depends on the hash seed
            self.rules.update([*dict.fromkeys(violation.rule_id for violation in found.violations)])
            self.causes.update({(each.rule_id, each.cause): None for each in found.violations if each.cause}.keys())
            return
        if found.is_held_back:
            self.held_back += 1
            if len(self.held_examples) < examples:
                self.held_examples.append((found, walk.terms(found)))
            return
        self.accepted += 1
        self.within_limits += found.is_run
        if found.left_out:
            self.left_out += 1
            return
        self.lifted.update(found.lifted)
        self.unknown.update(found.unknown_software)
        self._show(found, examples)
        for why in found.headline.why:
            self.why[why if why in self.why or len(self.why) < _MOST_REASONS else "other reasons"] += 1
        if not found.is_run:
            return
        self.would_run += 1
        if found.gpu_hours is None:
            return
        self.predicted += 1
        self.gpu_hours += found.gpu_hours
        price, why_not = walk.price(found.headline)
        if price is None:
            self.why_no_cost = why_not
        elif found.cost is not None:
            self.priced += 1
            self.cost = (self.cost or 0.0) + found.cost
            self.currency = price.currency

    def _show(self, found: CheckedPoint, examples: int) -> None:
        """Keep a point as an example if it is one of so many first points; equally fast ones stay in their order."""
        if self.is_by_time:
            insort(self.examples, found, key=_slowness)
            del self.examples[examples:]
        elif len(self.examples) < examples:
            self.examples.append(found)


def _slowness(point: CheckedPoint) -> float:
    rate = point.headline.tokens_per_s_per_gpu if point.headline else None
    return math.inf if rate is None else -rate


def summarize_test(walk: PointWalk, examples: int, *, is_by_time: bool = False) -> SweepSummary:
    """Go through every point of a test, keeping only counts and some points. BadInput names the test's file.

    examples, is_by_time: so many of the first points are kept, or of the fastest.
    """
    axes = {name: len(values) for name, values in walk.sweep.axes.items()}
    summary = SweepSummary(walk.test_id, axes, walk.memory_limit, is_by_time, not_considered=walk.not_considered)
    summary.run_holds_back = walk.limits.memory_share is not None
    summary.fill_in = fill_in_notes(walk.sweep, walk.pinned)
    with naming_file(walk.test):
        for found in walk.points():
            summary.add(found, walk, examples)
    summary.budget_note = walk.budget_note()
    return summary
