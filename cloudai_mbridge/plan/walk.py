"""The points of a test's sweep, with the decision about each, for both `run` and `sweep plan`.

Decided are the order, which points are held back for their memory, and which are beyond the limits of the sweep.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from cloudai_mbridge.constraints import RuleSet, Violation
from cloudai_mbridge.errors import BadInput, counted
from cloudai_mbridge.estimate.headline import START_UP_S, Headline, MemoryLimit
from cloudai_mbridge.estimate.point import groups_of, guess_of
from cloudai_mbridge.models.loading.load import LoadedTest
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.values.time_limit import parse_time_limit
from cloudai_mbridge.plan.launchers import LAUNCHERS
from cloudai_mbridge.plan.run_plan import SearchPlan
from cloudai_mbridge.sweep.checked import CheckedPoint, checked_points, informative
from cloudai_mbridge.sweep.estimated import SweepEstimates, memory_violation
from cloudai_mbridge.sweep.expand import SweepSpace
from cloudai_mbridge.sweep.pinned import pinned_by
from cloudai_mbridge.training.flops import NEW, Formula

PREDICTED = f"predicted, with {START_UP_S:g} s of start-up a run"
BY_LIMIT = "GPUs x time limit"


class Budget:
    """The assumed cost of a test's runs. where: the test, for messages. max_gpu_hours: None allows all."""

    def __init__(self, where: str, max_gpu_hours: float | None) -> None:
        self._where, self._most = where, max_gpu_hours
        self.gpu_hours = 0.0
        self._rules: Counter[str] = Counter()

    def price(
        self, headline: Headline | None, num_gpus: int, num_steps: int | None, time_limit_s: float | None, num_runs: int
    ) -> tuple[float, str]:
        """Return the GPU-hours of a point's runs and the rule: predicted if possible, else by the time limit.

        A run ends at its time limit, regardless of the prediction. BadInput: both are missing.
        """
        limit = None if time_limit_s is None else num_gpus * time_limit_s / 3600
        predicted = headline.gpu_hours(num_steps, START_UP_S) if headline else None
        if predicted is not None:
            return num_runs * (predicted if limit is None else min(predicted, limit)), PREDICTED
        if limit is None:
            raise BadInput(f"{self._where}: sweep.max_gpu_hours needs a time_limit; set one")
        return num_runs * limit, BY_LIMIT

    def spend(self, gpu_hours: float, rule: str) -> bool:
        """Add the cost of a point; False if it would exceed the budget."""
        if self._most is not None and self.gpu_hours + gpu_hours > self._most:
            return False
        self.gpu_hours += gpu_hours
        self._rules[rule] += 1
        return True

    def note(self) -> str | None:
        """Return how the included points were priced; None without a budget or a prediction."""
        if self._most is None or not self._rules[PREDICTED]:
            return None
        counts = "; ".join(f"{counted(count, 'point')}: {rule}" for rule, count in sorted(self._rules.items()))
        return f"{self._where}: max_gpu_hours counts {self.gpu_hours:.4g} GPU-hours ({counts})"


@dataclass(frozen=True)
class Decision:
    """What is decided about a point. headline: None for a point that breaks a rule.

    beyond: the limit of the sweep that leaves the point out, such as "max_points = 3"; "" for none.
    """

    point: CheckedPoint
    headline: Headline | None = None
    is_held_back: bool = False
    beyond: str = ""

    @property
    def is_run(self) -> bool:
        """Whether the point is within all limits."""
        return self.headline is not None and not self.is_held_back and not self.beyond


class PointWalk:
    """The points of one test on a system. order: None takes the sweep's."""

    def __init__(
        self,
        test: LoadedTest,
        system: System,
        rules: RuleSet,
        memory_limit: MemoryLimit | None,
        order: str | None = None,
        formula: Formula = NEW,
    ) -> None:
        self._test, self._system, self.memory_limit = test, system, memory_limit
        self.limits = test.definition.sweep
        self._order = order or self.limits.order
        self.sweep = SweepSpace(test.definition, test.run)
        self.pinned = pinned_by(test.definition, system, rules)
        extra = test.definition.extra_cmd_args
        self.estimates = SweepEstimates(self.sweep, system, extra, formula, self.pinned)
        self.budget = Budget(f"test {test.run.id!r}", self.limits.max_gpu_hours)
        self._base = self.sweep.base_args()
        self.runs_per_point = test.run.iterations * self.limits.repeats

    @property
    def size(self) -> int:
        """The number of points before exclusion."""
        return self.sweep.grid.size + len(self.limits.include)

    def __iter__(self) -> Iterator[Decision]:
        """Yield a decision for every point, in order. The first point that does not fit ends what is run."""
        num_run, beyond = 0, ""
        points = partial(checked_points, self.sweep, self._system, self.pinned)
        for point in informative(points, self._speed) if self._order == "informative" else points():
            decision = self.judge(point)
            if not decision.is_run:
                yield decision
                continue
            beyond = beyond or self._limit_before(decision, num_run)
            num_run += not beyond
            yield Decision(point, decision.headline, beyond=beyond)

    def judge(self, point: CheckedPoint) -> Decision:
        """Decide about a point alone, whatever the limits of the sweep leave of the others."""
        if point.violations:
            return Decision(point)
        headline = self.estimates.of(point)
        return Decision(point, headline, is_held_back=headline.exceeds(self.memory_limit))

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
        return SearchPlan(
            groups, share, self._test.definition.agent_steps, is_calibrated=is_calibrated, is_guess=guessed is not None
        )

    def memory_violation(self, point: CheckedPoint) -> Violation:
        """Return why a point is held back."""
        assert self.memory_limit is not None  # else none is
        request = self.estimates.request(point)
        return memory_violation(self.estimates.of(point), self.memory_limit.share, request)

    def _speed(self, point: CheckedPoint) -> float | None:
        headline = self.estimates.of(point)
        return None if headline.exceeds(self.memory_limit) else headline.tokens_per_s_per_gpu or 0.0

    def _limit_before(self, decision: Decision, num_run: int) -> str:
        """Return the limit that a point would exceed; "" if it is within all of them, and its cost is added."""
        if num_run == self.limits.max_points:
            return f"max_points = {num_run}"
        if self.limits.max_gpu_hours is None:
            return ""
        assert decision.headline is not None  # no other point is priced
        limit = parse_time_limit(self._test.run.time_limit or self.estimates.value(decision.point, "time_limit"))
        launcher = LAUNCHERS[self.estimates.value(decision.point, "launcher")]
        is_known = "max_steps" in decision.point.coordinates or launcher.knows_steps(self._base, self._test.run)
        num_steps = self.estimates.num_steps(decision.point) if is_known else None
        num_gpus, num_runs = decision.headline.num_gpus, self.runs_per_point
        hours, rule = self.budget.price(decision.headline, num_gpus, num_steps, limit, num_runs)
        return "" if self.budget.spend(hours, rule) else f"max_gpu_hours = {self.limits.max_gpu_hours:g}"
