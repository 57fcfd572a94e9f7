"""What a sweep would run, in which order, at which cost: one look at a time, so that many points need no memory."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from cloudai_mbridge.constraints import Lifted, RuleSet, Violation
from cloudai_mbridge.estimate.headline import DEFAULT_LIMIT, Headline, MemoryLimit, Price, price_of
from cloudai_mbridge.estimate.overrides import not_considered
from cloudai_mbridge.files.names import label
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.loading.load import LoadedTest
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.values.time_limit import parse_time_limit
from cloudai_mbridge.plan.budget import Budget
from cloudai_mbridge.recipes.apply import core_release, training_config
from cloudai_mbridge.sweep import CheckedPoint, Sweep, checked_points
from cloudai_mbridge.sweep.estimated import SweepEstimates, largest_terms
from cloudai_mbridge.sweep.fill_in import fill_in_notes, lifted_note
from cloudai_mbridge.sweep.order import informative
from cloudai_mbridge.sweep.pinned import pinned_by
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
class Look:
    """One point. gpu_hours, cost: of the steps of all its runs; None where not known. is_run: within the limits."""

    point: CheckedPoint
    violations: tuple[Violation, ...]
    headline: Headline | None = None
    gpu_hours: float | None = None
    cost: float | None = None
    is_held_back: bool = False
    is_run: bool = False

    @property
    def label(self) -> str:
        """The point's name."""
        return label(self.point.coordinates)


class TestPlan:
    """The points of one test on a system."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    def __init__(self, test: LoadedTest, system: System, options: PlanOptions) -> None:
        self.test_id, self.limits = test.run.id, test.definition.sweep
        self.sweep = Sweep(test.definition, test.run)
        self.pinned = pinned_by(test.definition, system, options.rules)
        extra = test.definition.extra_cmd_args
        self.estimates = SweepEstimates(self.sweep, system, extra, options.formula, self.pinned)
        self.budget = Budget(f"test {test.run.id!r}", self.limits.max_gpu_hours)
        share = self.limits.memory_share if options.memory_share is None else options.memory_share
        limit = DEFAULT_LIMIT if share is None else MemoryLimit(share)
        self.memory_limit = None if options.include_oom_risk else limit
        axes = self.sweep.grid.names
        self.not_considered = not_considered(self.sweep.base_args(), extra, axes)
        self._test, self._system, self._is_checked = test, system, False
        self.limit_reached = ""
        self._order = options.order or self.limits.order
        self._num_runs = test.run.iterations * self.limits.repeats
        self._prices: dict[str, tuple[Price | None, str]] = {}

    def looks(self) -> Iterator[Look]:
        """Yield every point, in order."""
        num_run, self.limit_reached = 0, ""
        for point in self._points():
            look = self.look_at(point)
            if look.headline is not None and not look.is_held_back:
                self.limit_reached = self.limit_reached or self._limit_before(point, look.headline, num_run)
                num_run += not self.limit_reached
                look = replace(look, is_run=not self.limit_reached)
            yield look

    def _limit_before(self, point: CheckedPoint, headline: Headline, num_run: int) -> str:
        """Return the limit that a point would pass; "" if it is within all of them, and is counted in."""
        if num_run == self.limits.max_points:
            return f"beyond max_points = {num_run}"
        return "" if self._spend(point, headline) else f"beyond max_gpu_hours = {self.limits.max_gpu_hours:g}"

    @property
    def coordinate_names(self) -> list[str]:
        """Return what points have as coordinates: the axes, and what included points set besides."""
        included = (name for pattern in self.limits.include for name in pattern)
        return list(dict.fromkeys((*self.sweep.grid.names, *included)))

    def look_at(self, point: CheckedPoint) -> Look:
        """Judge a point by itself, whatever the limits of the sweep leave of the others."""
        if violations := point.violations:
            return Look(point, violations)
        self._check_training(point)
        headline = self.estimates.of(point)
        hours = self._gpu_hours(point, headline)
        price = self.price(headline)[0]
        cost = price.per_gpu_hour * hours if price and hours is not None else None
        return Look(point, (), headline, hours, cost, is_held_back=headline.exceeds(self.memory_limit))

    def _check_training(self, point: CheckedPoint) -> None:
        """Refuse, at the first point that breaks no rule, what `mbridge run` refuses of the training configuration."""
        if self._is_checked:
            return
        self._is_checked = True
        _, args, recipe = point.resolve()
        if args.launcher is Launcher.EMBEDDED and recipe is not None:
            extra = self._test.definition.extra_cmd_args
            training_config(recipe, args, extra, core_release(self._system))

    def price(self, headline: Headline) -> tuple[Price | None, str]:
        """Return the price of a point's GPU, or why there is none."""
        name = headline.gpu or ""
        if name not in self._prices:
            self._prices[name] = price_of(self._system, name)
        return self._prices[name]

    def terms(self, point: CheckedPoint) -> str:
        """Return the largest terms of a point's fullest stage."""
        return largest_terms(self.estimates.request(point))

    def _points(self) -> Iterator[CheckedPoint]:
        points = partial(checked_points, self.sweep, self._system, self.pinned)
        return informative(points, self._speed) if self._order == "informative" else points()

    def _speed(self, point: CheckedPoint) -> float | None:
        headline = self.estimates.of(point)
        return None if headline.exceeds(self.memory_limit) else headline.tokens_per_s_per_gpu or 0.0

    def _gpu_hours(self, point: CheckedPoint, headline: Headline) -> float | None:
        hours = headline.gpu_hours(self.estimates.num_steps(point))
        return None if hours is None else hours * self._num_runs

    def _spend(self, point: CheckedPoint, headline: Headline) -> bool:
        if self.limits.max_gpu_hours is None:
            return True
        limit = parse_time_limit(self._test.run.time_limit or self.estimates.value(point, "time_limit"))
        steps = self.estimates.num_steps(point)
        hours, rule = self.budget.price(headline, headline.num_gpus, steps, limit, self._num_runs)
        if not self.budget.allows(hours):
            return False
        self.budget.spend(hours, rule)
        return True


@dataclass
class SweepSummary:
    """Counts over all points of one test; totals over those that would run. why: reasons why nothing is predicted.

    not_considered: what is set and no prediction reads. run_holds_back: `mbridge run` has a limit of memory, too.
    fill_in: what the launcher fills in. lifted: accepted points by what CloudAI has against them.
    """

    test_id: str
    axes: dict[str, int]
    memory_limit: MemoryLimit | None = None
    points: int = 0
    accepted: int = 0
    held_back: int = 0
    would_run: int = 0
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
    examples: list[Look] = field(default_factory=list)
    held_examples: list[tuple[Look, str]] = field(default_factory=list)

    def lifted_notes(self) -> Iterator[str]:
        """Yield what is said of points that only CloudAI rejects."""
        return (lifted_note(lifted, count) for lifted, count in self.lifted.items())

    def add(self, look: Look, plan: TestPlan, examples: int) -> None:
        """Count a look in."""
        self.points += 1
        if look.violations or look.headline is None:
            self.rules.update({violation.rule_id for violation in look.violations})
            return
        if look.is_held_back:
            self.held_back += 1
            if len(self.held_examples) < examples:
                self.held_examples.append((look, plan.terms(look.point)))
            return
        self.accepted += 1
        self.lifted.update(look.point.lifted)
        if len(self.examples) < examples:
            self.examples.append(look)
        for why in look.headline.why:
            self.why[why if why in self.why or len(self.why) < _MOST_REASONS else "other reasons"] += 1
        if look.is_run:
            self._add_run(look, plan)

    def _add_run(self, look: Look, plan: TestPlan) -> None:
        self.would_run += 1
        if look.gpu_hours is None or look.headline is None:
            return
        self.predicted += 1
        self.gpu_hours += look.gpu_hours
        price, why_not = plan.price(look.headline)
        if price is None:
            self.why_no_cost = why_not
        elif look.cost is not None:
            self.priced += 1
            self.cost = (self.cost or 0.0) + look.cost
            self.currency = price.currency


def summarize_test(plan: TestPlan, examples: int) -> SweepSummary:
    """Go through every point of a test, keeping counts and the first of them only."""
    axes = {axis.name: len(axis.values) for axis in plan.sweep.axes}
    summary = SweepSummary(plan.test_id, axes, plan.memory_limit, not_considered=plan.not_considered)
    summary.run_holds_back = plan.limits.memory_share is not None
    summary.fill_in = fill_in_notes(plan.sweep, plan.pinned)
    for look in plan.looks():
        summary.add(look, plan, examples)
    summary.budget_note = plan.budget.note()
    return summary
