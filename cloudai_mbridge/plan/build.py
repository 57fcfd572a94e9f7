"""From a loaded scenario and a system to a plan: expand, check, place, within the sweep's limits."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from cloudai_mbridge.constraints import Lifted, RuleSet, Violation
from cloudai_mbridge.errors import BadInput, counted
from cloudai_mbridge.estimate.headline import Headline, MemoryLimit
from cloudai_mbridge.files.names import label
from cloudai_mbridge.files.run_files import ROOT_FILES
from cloudai_mbridge.megatron_bridge.launcher.plan import graph_note, is_passed
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.loading.load import LoadedScenario, LoadedTest
from cloudai_mbridge.models.system import Executor, SlurmSystem, System
from cloudai_mbridge.plan.budget import Budget
from cloudai_mbridge.plan.node_groups import NodeStates, resolve_groups, unknown_states
from cloudai_mbridge.plan.pre_test import plan_pre_test
from cloudai_mbridge.plan.run import plan_run
from cloudai_mbridge.plan.run_plan import RejectedPoint, RunPlan, SweepPlan
from cloudai_mbridge.plan.supported import notes_on, notes_on_system, refuse_unsupported
from cloudai_mbridge.sweep import CheckedPoint, Sweep, checked_points
from cloudai_mbridge.sweep.estimated import SweepEstimates, memory_violation
from cloudai_mbridge.sweep.fill_in import fill_in_notes, lifted_note
from cloudai_mbridge.sweep.order import informative
from cloudai_mbridge.sweep.pinned import pinned_by

# Rejected points of one test that are kept with their reasons; beyond it they are counted by rule.
MOST_REJECTED_ROWS = 1000
# Runs of a scenario: more than Slurm's default MaxJobCount (10,000) and what an output directory holds comfortably.
MOST_RUNS = 20_000


def build_plan(
    loaded: LoadedScenario,
    system: System,
    node_states: NodeStates = unknown_states,
    rules: RuleSet = RuleSet.RELEASE,
) -> SweepPlan:
    """Decide about every point of every test.

    node_states: of the nodes of a partition, for tests that name groups.
    rules: whose verdict rules C01-C18 give on points of Megatron-Bridge's launcher.

    Raises:
        BadInput: something asked for is not implemented, or a recipe does not exist.
    """
    refuse_unsupported(loaded, system)
    loaded = resolve_groups(loaded, system, node_states)
    tests = [_TestPlan(test, system, rules) for test in (*loaded.pre_hook, *loaded.tests, *loaded.post_hook)]
    planned = 0
    for test in tests:
        test.build(MOST_RUNS - planned)
        planned += len(test.runs)
    runs = (*plan_pre_test(loaded, system), *with_hooks(loaded, (run for test in tests for run in test.runs)))
    runs = tuple(replace(run, hang_timeout_s=_hang_timeout_s(loaded, run)) for run in runs)
    _require_time_limits(loaded, runs)
    return SweepPlan(
        scenario=loaded.scenario.name,
        system=system.name,
        tests=tuple(test.run.id for test in (*loaded.pre_hook, *loaded.tests, *loaded.post_hook)),
        runs=assign_arrays(runs, system),
        rejected=tuple(point for test in tests for point in test.rejected),
        num_rejected=sum(test.num_rejected for test in tests),
        rule_counts=dict(sorted(sum((test.rule_counts for test in tests), Counter[str]()).items())),
        notes=(*notes_on_system(system), *loaded.notes, *(note for test in tests for note in test.notes)),
        runner=loaded.scenario.runner,
    )


def _hang_timeout_s(loaded: LoadedScenario, run: RunPlan) -> float | None:
    """Return how long a run may go without a step; the upstream launcher, which may tell of none, only if asked."""
    runner = loaded.scenario.runner
    return runner.hang_timeout_s if run.upstream is None or "hang_timeout_s" in runner.model_fields_set else None


def _require_time_limits(loaded: LoadedScenario, runs: Iterable[RunPlan]) -> None:
    """Raise BadInput if the scenario's budget cannot be kept because a run may last for ever."""
    if loaded.scenario.runner.max_gpu_hours is not None:
        for run in runs:
            if run.time_limit_s is None:
                raise BadInput(f"test {run.test_id!r}: runner.max_gpu_hours needs a time_limit; set one")


class _TestPlan:
    """What becomes of one test's points."""

    def __init__(self, test: LoadedTest, system: System, rules: RuleSet) -> None:
        self._test, self._system = test, system
        self._most_runs = MOST_RUNS
        self._pinned = pinned_by(test.definition, system, rules)
        self._lifted: Counter[Lifted] = Counter()
        self._limits = test.definition.sweep
        self._accepted = 0
        self._runs_per_point = test.run.iterations * test.definition.sweep.repeats
        self._budget = Budget(f"test {test.run.id!r}", self._limits.max_gpu_hours)
        self.runs: list[RunPlan] = []
        self.rejected: list[RejectedPoint] = []
        self.num_rejected = 0
        self.rule_counts: Counter[str] = Counter()
        self.notes: list[str] = []

    def build(self, most_runs: int) -> None:
        """Go through the points, in order, until a limit of the sweep is reached. most_runs: that it may plan."""
        self._most_runs = most_runs
        sweep = Sweep(self._test.definition, self._test.run)
        extra = self._test.definition.extra_cmd_args
        estimates = SweepEstimates(sweep, self._system, extra, pinned=self._pinned)
        self.notes += notes_on(self._test)
        for text in fill_in_notes(sweep, self._pinned):
            self._note(f"test {self._test.run.id!r}: {text}")
        for examined, point in enumerate(self._points(sweep, estimates)):
            if violations := point.violations or self._held_back(point, estimates):
                self._reject(point, violations)
                continue
            headline = estimates.of(point)
            runs = (replace(run, predicted=_predicted(headline)) for run in self._plan_runs(point))
            price = self._price(first := next(runs), headline)
            if (limit := self._limit_before(price[0])) is not None:
                left = sweep.grid.size + len(self._limits.include) - examined
                rest = f"{counted(left, 'point')} {'was' if left == 1 else 'were'} not looked at"
                self.notes.append(f"test {self._test.run.id!r}: {limit}; {rest}")
                break
            self._accepted += 1
            self._lifted.update(point.lifted)
            self._budget.spend(*price)
            self._require_room()
            self.runs += [first, *runs]
        for lifted, count in self._lifted.items():
            self.notes.append(f"test {self._test.run.id!r}: {lifted_note(lifted, count)}")
        if note := self._budget.note():
            self.notes.append(note)
        if self.num_rejected > len(self.rejected):
            more = self.num_rejected - len(self.rejected)
            self._note(f"test {self._test.run.id!r}: counted, not listed: {counted(more, 'more rejected point')}")

    def _points(self, sweep: Sweep, estimates: SweepEstimates) -> Iterator[CheckedPoint]:
        """Yield all points in the sweep's order."""
        points = partial(checked_points, sweep, self._system, self._pinned)
        if self._limits.order != "informative":
            return points()

        share = self._limits.memory_share
        limit = None if share is None else MemoryLimit(share)

        def speed(point: CheckedPoint) -> float | None:
            headline = estimates.of(point)
            return None if headline.exceeds(limit) else headline.tokens_per_s_per_gpu or 0.0

        return informative(points, speed)

    def _held_back(self, point: CheckedPoint, estimates: SweepEstimates) -> tuple[Violation, ...]:
        """Return why the sweep's own limit of memory holds a point back; only a sweep that sets one has it."""
        share = self._limits.memory_share
        if share is None or not (headline := estimates.of(point)).exceeds(MemoryLimit(share)):
            return ()
        return (memory_violation(headline, share, estimates.request(point)),)

    def _reject(self, point: CheckedPoint, violations: tuple[Violation, ...]) -> None:
        self.num_rejected += 1
        self.rule_counts.update({violation.rule_id for violation in violations})
        if len(self.rejected) < MOST_REJECTED_ROWS:
            name = label(point.coordinates)
            run, definition = self._test.run, self._test.definition
            self.rejected.append(RejectedPoint(run.id, definition.name, name, point.coordinates, violations))

    def _plan_runs(self, point: CheckedPoint) -> Iterator[RunPlan]:
        resolved, args, recipe = point.resolve()
        self._require_measured_steps(args)
        for iteration in range(self._runs_per_point):
            run = plan_run(self._test, resolved, args, recipe, self._system, iteration)
            if resolved.num_nodes not in (None, run.num_nodes):
                self._note(
                    f"test {run.test_id!r}: the upstream launcher takes {counted(run.num_nodes, 'node')}"
                    f" for {counted(run.world_size, 'GPU')}; num_nodes = {resolved.num_nodes} does not reach it"
                )
            if run.upstream is not None and (note := graph_note(resolved.args)):
                self._note(f"test {run.test_id!r}: {note}")
            yield run

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _require_room(self) -> None:
        """Raise BadInput if the runs of one more point are more than a scenario may have."""
        if len(self.runs) + self._runs_per_point > self._most_runs:
            run, repeats = self._test.run, self._limits.repeats
            raise BadInput(
                f"test {run.id!r}: {counted(self._accepted, 'accepted point')} with iterations = {run.iterations} and"
                f" sweep.repeats = {repeats}: more than the {MOST_RUNS} runs that a scenario may have;"
                " set sweep.max_points, or ask for fewer runs"
            )

    def _limit_before(self, gpu_hours: float) -> str | None:
        """Return the limit that a point of this price would pass, if any."""
        if self._limits.max_points is not None and self._accepted >= self._limits.max_points:
            return f"max_points = {self._limits.max_points} is reached"
        if not self._budget.allows(gpu_hours):
            return f"max_gpu_hours = {self._limits.max_gpu_hours:g} ends the sweep: the next point does not fit"
        return None

    def _price(self, run: RunPlan, headline: Headline) -> tuple[float, str]:
        return self._budget.price(headline, run.world_size, run.num_steps, run.time_limit_s, self._runs_per_point)

    def _require_measured_steps(self, args: ResolvedCmdArgs) -> None:
        definition, steps = self._test.definition, args.max_steps or 0
        is_decided = args.launcher is Launcher.EMBEDDED or is_passed("max_steps", args, self._test.run)
        if is_decided and steps < 1:
            raise BadInput(f"test {self._test.run.id!r}: cmd_args.max_steps = {steps} trains nothing; use at least 1")
        if is_decided and steps <= (warmup := definition.warmup_steps(steps)):
            raise BadInput(
                f"test {self._test.run.id!r}: {definition.warmup_key} = {warmup} leaves no step to measure of"
                f" max_steps = {steps}; use at most {steps - 1} warm-up steps, or more steps"
            )


def _predicted(headline: Headline) -> dict[str, object] | None:
    """Return what a report sets beside the measurement; None where nothing is predicted."""
    if headline.step_time_s is None and headline.peak_memory_gib is None:
        return None
    return {
        "gpu": headline.gpu,
        "step_time_s": headline.step_time_s,
        "tflops_per_gpu": headline.tflops_per_gpu,
        "peak_memory_gib": headline.peak_memory_gib,
    }


# Slurm's default MaxArraySize is 1001, which allows the indices 0 to 1000.
MOST_TASKS = 1000


def assign_arrays(runs: Iterable[RunPlan], system: System) -> tuple[RunPlan, ...]:
    """Return the runs, with an array and an index where at least two share one."""
    ordered = list(runs)
    if not isinstance(system, SlurmSystem) or system.executor is not Executor.MBRIDGE:
        return tuple(ordered)
    groups: dict[object, list[RunPlan]] = {}
    for run in ordered:
        if run.upstream is None and not run.is_pre_test:
            groups.setdefault(_needs(run), []).append(run)
    arrays = [
        chunk
        for group in groups.values()
        for start in range(0, len(group), MOST_TASKS)
        if len(chunk := group[start : start + MOST_TASKS]) > 1
    ]
    place = {
        run.key: (f"{ROOT_FILES.arrays}/{number}", index)
        for number, chunk in enumerate(arrays)
        for index, run in enumerate(chunk)
    }
    return tuple(_placed(run, *place[run.key]) if run.key in place else run for run in ordered)


def _needs(run: RunPlan) -> object:
    secrets = tuple(sorted(run.secret_env.items()))
    return run.num_nodes, run.ranks_per_node, run.time_limit, run.nodes, run.exclude_nodes, secrets


def _placed(run: RunPlan, array: str, index: int) -> RunPlan:
    return replace(run, array=array, array_index=index)


def with_hooks(loaded: LoadedScenario, runs: Iterable[RunPlan]) -> Iterator[RunPlan]:
    """Put the runs of pre_test in front of all others, and those of post_test behind them.

    Raises:
        BadInput: the pre_test has nothing to run, and so nothing would be checked.
    """
    pre, post = ({test.run.id for test in hook} for hook in (loaded.pre_hook, loaded.post_hook))
    tests = tuple(test.run.id for test in loaded.tests)
    planned = list(runs)
    for test_id in pre - {run.test_id for run in planned}:
        raise BadInput(f"test {test_id!r}: the pre_test hook has no point to run: all are rejected; fix its test")
    for run in planned:
        if run.test_id in post:
            yield replace(run, after_completion=(*run.after_completion, *tests))
        else:
            yield replace(run, is_gate=run.test_id in pre)
