"""Preview of a sweep: its points, their order and cost, one point at a time, so that many need no memory."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from cloudai_mbridge.constraints import Lifted, RuleSet
from cloudai_mbridge.estimate.hardware import Price, price_of
from cloudai_mbridge.estimate.headline import DEFAULT_LIMIT, Headline, MemoryLimit
from cloudai_mbridge.estimate.request import not_considered
from cloudai_mbridge.files.names import label
from cloudai_mbridge.models.loading.load import LoadedTest
from cloudai_mbridge.models.loading.loaded import naming_file
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import TUNE
from cloudai_mbridge.plan.launchers import LAUNCHERS
from cloudai_mbridge.plan.select import PointChoice, axes_of
from cloudai_mbridge.plan.walk import Decision, PointWalk
from cloudai_mbridge.sweep.checked import CheckedPoint
from cloudai_mbridge.sweep.estimated import largest_terms
from cloudai_mbridge.sweep.pinned import fill_in_notes, lifted_note
from cloudai_mbridge.training.flops import NEW, Formula

_MOST_REASONS = 5


@dataclass(frozen=True)
class PlanOptions:
    """What the user says of the plan.

    memory_share: None takes the sweep's, else 0.9. order: None takes the sweep's.
    rules: whose verdict rules C01-C18 give on points of Megatron-Bridge's launcher.
    """

    memory_share: float | None = None
    include_oom_risk: bool = False
    order: str | None = None
    formula: Formula = NEW
    rules: RuleSet = RuleSet.RELEASE


@dataclass(frozen=True)
class PointPreview(Decision):
    """One point with what it needs. gpu_hours, cost: of the steps of all its runs; None where not known.

    left_out: why it was not chosen, "" if it was.
    """

    gpu_hours: float | None = None
    cost: float | None = None
    left_out: str = ""

    @property
    def label(self) -> str:
        """The point's name."""
        return label(self.point.coordinates)


class SweepPreview:
    """The points of one test on a system. choice: of the points to run, None for all."""

    choice: PointChoice | None = None

    def __init__(self, test: LoadedTest, system: System, options: PlanOptions) -> None:
        self.test, self.test_id, self.limits = test, test.run.id, test.definition.sweep
        share = self.limits.memory_share if options.memory_share is None else options.memory_share
        limit = DEFAULT_LIMIT if share is None else MemoryLimit(share)
        self.memory_limit = None if options.include_oom_risk else limit
        with naming_file(test):
            self.walk = PointWalk(test, system, options.rules, self.memory_limit, options.order, options.formula)
        self.sweep, self.pinned = self.walk.sweep, self.walk.pinned
        extra = test.definition.extra_cmd_args
        self.not_considered = not_considered(self.sweep.base_args(), extra, self.sweep.grid.names)
        self._system, self._is_checked = system, False
        self._price_of = cache(partial(price_of, system))

    def points(self) -> Iterator[PointPreview]:
        """Yield every point, in order."""
        points = map(self._preview, self.walk)
        choice = self.choice
        if choice is None:
            return points
        return (replace(found, left_out=self._why_not(found, choice)) for found in points)

    def _why_not(self, found: PointPreview, choice: PointChoice) -> str:
        is_held_back = found.is_held_back and self.limits.memory_share is not None
        return choice.why_not(
            self.test_id,
            found.label,
            found.point.coordinates,
            is_rejected=found.headline is None or is_held_back or bool(found.beyond),
            is_searched=self.test.definition.agent == TUNE,
        )

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Return the values of each axis, with those of the included points."""
        return axes_of(self.sweep, self.limits.include)

    @property
    def coordinate_names(self) -> list[str]:
        """Return the names of the points' coordinates: the axes, and further keys of included points."""
        included = (name for pattern in self.limits.include for name in pattern)
        return list(dict.fromkeys((*self.sweep.grid.names, *included)))

    def preview(self, point: CheckedPoint) -> PointPreview:
        """Judge a point alone, whatever the limits of the sweep leave of the others."""
        return self._preview(self.walk.judge(point))

    def _preview(self, decision: Decision) -> PointPreview:
        if (headline := decision.headline) is None:
            return PointPreview(**vars(decision))
        self._check_training(decision.point)
        hours = headline.gpu_hours(self.walk.estimates.num_steps(decision.point))
        hours = None if hours is None else hours * self.walk.runs_per_point
        price = self.price(headline)[0]
        cost = price.per_gpu_hour * hours if price and hours is not None else None
        return PointPreview(**vars(decision), gpu_hours=hours, cost=cost)

    def _check_training(self, point: CheckedPoint) -> None:
        """Apply the checks of `mbridge run` to the training configuration, at the first point that breaks no rule."""
        if self._is_checked:
            return
        self._is_checked = True
        _, args, recipe = point.resolve()
        LAUNCHERS[args.launcher].training(self.test, args, recipe, self._system)

    def price(self, headline: Headline) -> tuple[Price | None, str]:
        """Return the price of a point's GPU, or why it is missing."""
        return self._price_of(headline.gpu or "")

    def terms(self, point: CheckedPoint) -> str:
        """Return the largest terms of a point's fullest stage."""
        return largest_terms(self.walk.estimates.request(point))


@dataclass
class SweepSummary:
    """Counts over all points of one test; totals over those that would run. why: reasons why nothing is predicted.

    not_considered: what is set and no prediction reads. run_holds_back: `mbridge run` has a limit of memory, too.
    fill_in: what the launcher fills in. lifted: accepted points by what CloudAI has against them.
    left_out: accepted points that were not chosen. within_limits: accepted points, chosen or not, that a limit allows.
    """

    test_id: str
    axes: dict[str, int]
    memory_limit: MemoryLimit | None = None
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
    why: Counter[str] = field(default_factory=Counter)
    examples: list[PointPreview] = field(default_factory=list)
    held_examples: list[tuple[PointPreview, str]] = field(default_factory=list)

    def lifted_notes(self) -> Iterator[str]:
        """Yield the notes on points that only CloudAI rejects."""
        return (lifted_note(lifted, count) for lifted, count in self.lifted.items())

    def add(self, found: PointPreview, preview: SweepPreview, examples: int) -> None:
        """Add a point to the counts."""
        self.points += 1
        if found.headline is None:
            self.rules.update({violation.rule_id for violation in found.point.violations})
            return
        if found.is_held_back:
            self.held_back += 1
            if len(self.held_examples) < examples:
                self.held_examples.append((found, preview.terms(found.point)))
            return
        self.accepted += 1
        self.within_limits += found.is_run
        if found.left_out:
            self.left_out += 1
            return
        self.lifted.update(found.point.lifted)
        if len(self.examples) < examples:
            self.examples.append(found)
        for why in found.headline.why:
            self.why[why if why in self.why or len(self.why) < _MOST_REASONS else "other reasons"] += 1
        if found.is_run:
            self._add_run(found, found.headline, preview)

    def _add_run(self, found: PointPreview, headline: Headline, preview: SweepPreview) -> None:
        self.would_run += 1
        if found.gpu_hours is None:
            return
        self.predicted += 1
        self.gpu_hours += found.gpu_hours
        price, why_not = preview.price(headline)
        if price is None:
            self.why_no_cost = why_not
        elif found.cost is not None:
            self.priced += 1
            self.cost = (self.cost or 0.0) + found.cost
            self.currency = price.currency


def summarize_test(preview: SweepPreview, examples: int) -> SweepSummary:
    """Go through every point of a test, keeping only counts and the first points. BadInput names the test's file."""
    axes = {axis.name: len(axis.values) for axis in preview.sweep.axes}
    summary = SweepSummary(preview.test_id, axes, preview.memory_limit, not_considered=preview.not_considered)
    summary.run_holds_back = preview.limits.memory_share is not None
    summary.fill_in = fill_in_notes(preview.sweep, preview.pinned)
    with naming_file(preview.test):
        for found in preview.points():
            summary.add(found, preview, examples)
    summary.budget_note = preview.walk.budget.note()
    return summary
