"""From a loaded scenario and a system to a plan: expand, check, place, within the sweep's limits."""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from cloudai_mbridge.constraints import Lifted, RuleSet, Upstream, Violation
from cloudai_mbridge.errors import BadInput, counted
from cloudai_mbridge.estimate.headline import DEFAULT_LIMIT, Headline, MemoryLimit
from cloudai_mbridge.files.run_files import ROOT_FILES
from cloudai_mbridge.files.text import slug
from cloudai_mbridge.models.cmd_args import ADAPTER_TASKS, ResolvedCmdArgs
from cloudai_mbridge.models.loading import LoadedScenario, LoadedTest, naming_file
from cloudai_mbridge.models.slurm_values import expand_hostlist
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import TUNE
from cloudai_mbridge.plan.checks import (
    NodeStates,
    notes_on,
    notes_on_scenario,
    notes_on_system,
    refuse_unsupported,
    resolve_groups,
    unknown_states,
)
from cloudai_mbridge.plan.launchers import LAUNCHERS
from cloudai_mbridge.plan.run_plan import LeftOut, RejectedPoint, RunPlan, ScenarioPlan, plan_run
from cloudai_mbridge.plan.segments import notes_on_segments
from cloudai_mbridge.plan.select import ALL_POINTS, PointChoice, Selection, among, notes_on_choice
from cloudai_mbridge.plan.walk import PointWalk
from cloudai_mbridge.sweep.checked import CheckedPoint, checked_points
from cloudai_mbridge.sweep.expand import SweepSpace
from cloudai_mbridge.sweep.pinned import fill_in_notes, lifted_note, pinned_by, software_note

# Rejected points of one test that are kept with their reasons; beyond it they are counted by rule.
MOST_REJECTED_ROWS = 1000
# Runs of a scenario: above Slurm's default MaxJobCount (10,000) and a comfortable size of an output directory.
MOST_RUNS = 20_000


def build_plan(
    loaded: LoadedScenario,
    system: System,
    node_states: NodeStates = unknown_states,
    rules: RuleSet = RuleSet.RELEASE,
    selection: Selection = ALL_POINTS,
) -> ScenarioPlan:
    """Decide about every point of every test.

    selection: the points to run; hooks and the pre-test always do.
    node_states: of the nodes of a partition, for tests that name groups.
    rules: whose verdict rules C01-C18 give on points of Megatron-Bridge's launcher.
    BadInput: a requested feature is not implemented, or a recipe does not exist; as `PointChoice.check`.
    """
    refuse_unsupported(loaded, system)
    loaded = resolve_groups(loaded, system, node_states)
    tests = [_TestRuns(test, system, rules) for test in (*loaded.pre_hook, *loaded.tests, *loaded.post_hook)]
    planned = 0
    for test in tests:
        with naming_file(test.loaded):
            test.build(MOST_RUNS - planned)
        planned += len(test.runs)
    swept = tests[len(loaded.pre_hook) :][: len(loaded.tests)]
    left_out = _choose(swept, loaded.scenario.name, selection)
    tests = [test for test in tests if not test.is_left_out]
    kept = replace(loaded, tests=[test.loaded for test in swept if not test.is_left_out])
    gpus = system.gpus_per_node
    runs = (*plan_pre_test(kept, system), *with_hooks(kept, (run for test in tests for run in test.runs)))
    runs = tuple(
        replace(
            run,
            hang_timeout_s=run.launcher.hang_timeout_s(loaded.scenario.runner),
            # None if the job does not take whole nodes, or the number of their GPUs is unknown
            whole_nodes_gpus=run.num_nodes * gpus if system.takes_whole_nodes and gpus else None,
        )
        for run in runs
    )
    endless = [run for run in runs if run.time_limit_s is None]
    if endless and loaded.scenario.runner.max_gpu_hours is not None:
        raise BadInput(f"test {endless[0].test_id!r}: runner.max_gpu_hours needs a time_limit; set one")
    return ScenarioPlan(
        scenario=loaded.scenario.name,
        system=system.name,
        tests=tuple(test.loaded.run.id for test in tests),
        runs=assign_arrays(runs, system),
        rejected=tuple(point for test in tests for point in test.rejected),
        num_rejected=sum(test.num_rejected for test in tests),
        rule_counts=dict(sorted(sum((test.rule_counts for test in tests), Counter[str]()).items())),
        notes=(
            *notes_on_system(system),
            *notes_on_scenario(loaded, system),
            *loaded.notes,
            *(note for test in tests for note in test.notes),
            *notes_on_choice(left_out),
            *notes_on_segments(runs, system),
            *_notes_on_dependencies(swept),
        ),
        left_out=left_out,
        runner=loaded.scenario.runner,
    )


def _choose(tests: Sequence["_TestRuns"], scenario: str, selection: Selection) -> tuple[LeftOut, ...]:
    """Take the points that are not chosen out of the tests, and return them."""
    if not selection:
        return ()
    choice = among(selection, scenario, {test.loaded.run.id: test.axes for test in tests})
    left_out = tuple(point for test in tests for point in test.choose(choice))
    choice.check()
    return left_out


def _notes_on_dependencies(tests: Sequence["_TestRuns"]) -> Iterator[str]:
    """Yield the tests whose dependencies are left out, and so do not count."""
    missing = {test.loaded.run.id for test in tests if test.is_left_out}
    for run in (test.loaded.run for test in tests if not test.is_left_out):
        if names := [each.id for each in run.dependencies if each.id in missing]:
            yield f"test {run.id!r}: depends on {', '.join(names)}, left out here; it does not wait"


class _TestRuns:
    """The runs of one test, and its rejected points."""

    def __init__(self, test: LoadedTest, system: System, rules: RuleSet) -> None:
        self.loaded = self._test = test
        self._system, self._rules = system, rules
        self._where, self._limits = f"test {test.run.id!r}", test.definition.sweep
        self.runs: list[RunPlan] = []
        self.rejected: list[RejectedPoint] = []
        self.num_rejected = 0
        self.rule_counts: Counter[str] = Counter()
        self.notes: list[str] = []
        self.axes: dict[str, list[Any]] = {}
        self.is_left_out = False

    def build(self, most_runs: int) -> None:
        """Go through the points, in order, until a limit of the sweep is reached. most_runs: that it may plan."""
        share = self._limits.memory_share
        walk = PointWalk(self._test, self._system, self._rules, None if share is None else MemoryLimit(share))
        self.axes = walk.axes
        self.notes += notes_on(self._test)
        for text in fill_in_notes(walk.sweep, walk.pinned):
            self._note(f"{self._where}: {text}")
        lifted: Counter[Lifted] = Counter()
        unknown: Counter[str] = Counter()
        too_large: list[Headline] = []
        num_accepted = 0
        for num_examined, point in enumerate(walk):
            headline = point.headline
            if headline is None or point.is_held_back:
                self._reject(point, point.violations or (walk.memory_violation(point),))
                continue
            search = walk.search_plan(point) if self._test.definition.agent == TUNE else None
            planned = self._plan_runs(point, walk.runs_per_point + (search is not None), walk.pinned)
            predicted = (replace(run, predicted=_predicted(headline, run), search=search) for run in planned)
            runs = predicted if search is None else _with_one_again(predicted)
            first = next(runs)
            if point.beyond:
                is_count = num_accepted == self._limits.max_points
                ending = "is reached" if is_count else "ends the sweep: the next point does not fit"
                num_left = walk.size - num_examined
                rest = f"{counted(num_left, 'point')} {'was' if num_left == 1 else 'were'} not looked at"
                self.notes.append(f"{self._where}: {point.beyond} {ending}; {rest}")
                break
            num_accepted += 1
            too_large += [headline] if share is None and headline.exceeds(DEFAULT_LIMIT) else []
            lifted.update(point.lifted)
            unknown.update(point.unknown_software)
            self._require_room(num_accepted, most_runs, walk.runs_per_point)
            self.runs += [first, *runs]
        self.notes += [f"{self._where}: {lifted_note(rule, count)}" for rule, count in lifted.items()]
        self.notes += [f"{self._where}: {software_note(missing, count)}" for missing, count in unknown.items()]
        self.notes += self._memory_notes(too_large, num_accepted)
        if note := walk.budget_note():
            self.notes.append(note)
        if more := self.num_rejected - len(self.rejected):
            self._note(f"{self._where}: counted, not listed: {counted(more, 'more rejected point')}")

    def choose(self, choice: PointChoice) -> Iterator[LeftOut]:
        """Yield the points that are not chosen, and drop their runs; the test is left out if none is."""
        test_id, is_searched = self._test.run.id, self._test.definition.agent == TUNE
        points = {run.label: run.coordinates for run in self.runs}
        reasons = {
            label: choice.why_not(test_id, label, coordinates, is_searched=is_searched)
            for label, coordinates in points.items()
        }
        found = [choice.why_not(test_id, each.label, each.coordinates, is_rejected=True) for each in self.rejected]
        self.runs = [run for run in self.runs if not reasons[run.label]]
        left_out = [LeftOut(test_id, label, reason) for label, reason in reasons.items() if reason]
        self.is_left_out = not self.runs and (bool(points) or all(found))
        if is_searched and left_out and self.runs:
            self._note(f"{self._where}: the search is among the chosen {counted(len(points) - len(left_out), 'point')}")
        yield from left_out

    def _memory_notes(self, too_large: Sequence[Headline], num_accepted: int) -> Iterator[str]:
        """Yield how many of the points to run are predicted not to fit into the memory of the GPU."""
        if not too_large:
            return
        worst = max(too_large, key=lambda headline: headline.peak_memory_gib or 0.0)
        of_all = f"{len(too_large)} of {counted(num_accepted, 'accepted point')}"
        most = f"up to {worst.peak_memory_gib or 0.0:.4g} of {worst.gpu_memory_gib or 0.0:.4g} GiB"
        remedy = f"[sweep] memory_share = {DEFAULT_LIMIT.share:g} leaves them out"
        yield f"{self._where}: {of_all} predicted not to fit in memory ({most}); {remedy}"

    def _reject(self, point: CheckedPoint, violations: tuple[Violation, ...]) -> None:
        self.num_rejected += 1
        self.rule_counts.update({violation.rule_id for violation in violations})
        if len(self.rejected) < MOST_REJECTED_ROWS:
            names = self._test.run.id, self._test.definition.name, point.label
            self.rejected.append(RejectedPoint(*names, point.coordinates, violations))

    def _plan_runs(self, point: CheckedPoint, count: int, pinned: Upstream) -> Iterator[RunPlan]:
        resolved, args, recipe = point.resolve()
        preset = pinned.preset_of(resolved.args)
        self._require_measured_steps(args)
        for iteration in range(count):
            run = plan_run(self._test, resolved, args, recipe, self._system, iteration, preset)
            self._require_unprofiled_steps(run)
            for note in run.launcher.notes_on_run(resolved, run):
                self._note(f"{self._where}: {note}")
            yield run

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _require_room(self, num_accepted: int, most_runs: int, runs_per_point: int) -> None:
        """Raise BadInput if the runs of one more point are more than a scenario may have."""
        if len(self.runs) + runs_per_point > most_runs:
            raise BadInput(
                f"{self._where}: {counted(num_accepted, 'accepted point')} with iterations ="
                f" {self._test.run.iterations} and sweep.repeats = {self._limits.repeats}: more than the {MOST_RUNS}"
                " runs that a scenario may have; set sweep.max_points, or ask for fewer runs"
            )

    def _require_measured_steps(self, args: ResolvedCmdArgs) -> None:
        definition, steps = self._test.definition, args.max_steps or 0
        if not LAUNCHERS[args.launcher].knows_steps(args, self._test.run):
            return
        if steps < 1:
            raise BadInput(f"{self._where}: cmd_args.max_steps = {steps} trains nothing; use at least 1")
        if steps <= (warmup := definition.warmup_steps(steps)):
            raise BadInput(
                f"{self._where}: {definition.warmup_key} = {warmup} leaves no step to measure of"
                f" max_steps = {steps}; use at most {steps - 1} warm-up steps, or more steps"
            )

    def _require_unprofiled_steps(self, run: RunPlan) -> None:
        """Raise BadInput if the warm-up and a profiler leave no step to measure."""
        if run.profiled is None or run.num_steps is None:
            return
        first, last = run.profiled
        if first <= run.warmup_steps + 1 and last >= run.num_steps:
            raise BadInput(
                f"{self._where}: a profiler slows steps {first} to {min(last, run.num_steps)} of max_steps ="
                f" {run.num_steps}, and the warm-up takes {run.warmup_steps}: no step is left to measure; profile fewer"
                " steps, or set more"
            )


def _with_one_again(runs: Iterable[RunPlan]) -> Generator[RunPlan]:
    """Mark the last run of a point to be submitted only if its search requests a further measurement."""
    *firsts, last = runs
    yield from firsts
    if last.search is not None:
        yield replace(last, search=replace(last.search, is_again=True))


def _predicted(headline: Headline, run: RunPlan) -> dict[str, object] | None:
    """Return the predictions that a report compares with the measurement; None without any."""
    if headline.step_time_s is None and headline.peak_memory_gib is None:
        return None
    names = ("gpu", "step_time_s", "tflops_per_gpu", "peak_memory_gib")
    predicted = {name: getattr(headline, name) for name in names}
    if run.training_config.get("peft") or run.args.get("task") in ADAPTER_TASKS:
        predicted["tflops_per_gpu"] = None  # the launchers log frozen weights in full
    return predicted


# Slurm's default MaxArraySize is 1001, which allows the indices 0 to 1000.
MOST_TASKS = 1000


def assign_arrays(runs: Sequence[RunPlan], system: System) -> tuple[RunPlan, ...]:
    """Return the runs, with an array and an index if at least two share one."""
    if not system.submits_arrays:
        return tuple(runs)
    groups: dict[object, list[RunPlan]] = {}
    for run in runs:
        if run.launcher.has_script and not run.is_pre_test and run.search is None:
            secrets = tuple(sorted(run.secret_env.items()))
            limits = run.time_limit, run.preempt_time_s
            needs = run.num_nodes, run.segment, run.ranks_per_node, limits, run.nodes, run.exclude_nodes, secrets
            groups.setdefault(needs, []).append(run)
    arrays = [
        chunk
        for group in groups.values()
        for start in range(0, len(group), MOST_TASKS)
        if len(chunk := group[start : start + MOST_TASKS]) > 1
    ]
    placed = {
        run.key: replace(run, array=f"{ROOT_FILES.arrays}/{number}", array_index=index)
        for number, chunk in enumerate(arrays)
        for index, run in enumerate(chunk)
    }
    return tuple(placed.get(run.key, run) for run in runs)


def with_hooks(loaded: LoadedScenario, runs: Iterable[RunPlan]) -> Iterator[RunPlan]:
    """Schedule pre_test before all other tests, and post_test after them; BadInput if pre_test has no runs."""
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


PRE_TEST = "pre_test"


def plan_pre_test(loaded: LoadedScenario, system: System) -> tuple[RunPlan, ...]:
    """Plan one run per node, on that node alone; none if the scenario has no pre_test.

    The nodes are those that the tests name, if all name some, else those of the system's default partition.
    BadInput: the test is a sweep, breaks a rule on one node, or no file lists the nodes.
    """
    if loaded.pre_test is None:
        return ()
    if any(test.run.id == PRE_TEST for test in loaded.tests):
        raise BadInput(f"scenario {loaded.scenario.name!r}: test id {PRE_TEST!r} is the pre-test's; rename the test")
    are_named = all(test.run.nodes for test in loaded.tests)
    lists = [nodes for test in loaded.tests for nodes in test.run.nodes] if are_named else system.default_nodes
    names = ["localhost"]
    if not system.is_one_machine:
        names = list(dict.fromkeys(name for text in lists for name in expand_hostlist(text)))
    if not names:
        raise BadInput(
            f"system {system.name!r}: pre_test needs the nodes' names; list them as partitions.nodes of"
            f" {system.default_partition!r}"
        )
    return tuple(_on_node(loaded.pre_test, system, node) for node in names)


def _on_node(test: LoadedTest, system: System, node: str) -> RunPlan:
    where = f"pre_test {test.definition.name!r}"
    nodes = [] if system.is_one_machine else [node]
    placed = LoadedTest(test.run.model_copy(update={"nodes": nodes, "num_nodes": 1}), test.definition)
    pinned = pinned_by(placed.definition, system)
    points = list(checked_points(SweepSpace(placed.definition, placed.run), system, pinned))
    if len(points) != 1:
        raise BadInput(f"{where}: is a sweep of {len(points)} points; give one value for every argument")
    if points[0].violations:
        raise BadInput(f"{where}: {'; '.join(map(str, points[0].violations))}")
    resolved, args, recipe = points[0].resolve()
    run = plan_run(placed, resolved, args, recipe, system, 0, pinned.preset_of(resolved.args))
    if not run.launcher.has_script:
        raise BadInput(f"{where}: the upstream launcher checks no single node; use launcher = 'embedded'")
    return replace(run, key=f"{PRE_TEST}/{slug(node)}/0", label=node, is_pre_test=True)
