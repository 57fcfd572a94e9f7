"""Selection of a search's points: which are submitted next, and when the others are no longer needed."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.runner.context import Phase, RunnerContext, Tracked
from cloudai_mbridge.runner.journal.journal import JournalEntry


class Choice(NamedTuple):
    """Keys of the waiting runs that may be submitted now. over: why no others will be; "" while the search goes on."""

    keys: Collection[str]
    over: str = ""


class Chooser(Protocol):
    """Decides about the runs of one test, again after each change."""

    def choose(self, runs: Sequence[Tracked], entry_of: Callable[[str], JournalEntry]) -> Choice:
        """Return the runs to submit. runs: all of the test, in order. entry_of: the journal's entry of a key."""

    def why_end(self, run: RunPlan, step_times: Sequence[float]) -> str:
        """Return why a run may end early, else "". step_times: seconds, of all steps after the warm-up so far."""


class Searches:
    """The tests that are searched, by id."""

    def __init__(self, context: RunnerContext, choosers: Mapping[str, Chooser]) -> None:
        self._context, self._choosers = context, choosers
        self._runs = {test: [run for run in context.runs if run.plan.test_id == test] for test in choosers}

    def why_end(self, run: RunPlan, step_times: Callable[[], Sequence[float]]) -> str:
        """Return why an active run may end early, else ""."""
        chooser = self._choosers.get(run.test_id)
        return "" if chooser is None else chooser.why_end(run, step_times())

    def among(self, ready: Iterable[Tracked]) -> list[Tracked]:
        """Return the runs to submit; leave the untried runs of a finished search out for good.

        Runs that were submitted before, and are to be retried, are always among them.
        """
        waiting = list(ready)
        chosen: set[str] = set()
        for test, chooser in self._choosers.items():
            if not any(run.plan.test_id == test for run in waiting):
                continue
            choice = chooser.choose(self._runs[test], self._context.journal.entry)
            chosen.update(choice.keys)
            if choice.over:
                untried = [run for run in self._runs[test] if run.phase is Phase.WAITING and not run.number]
                self._context.leave_untried(untried, choice.over)
        waiting = [run for run in waiting if run.phase is Phase.WAITING]
        return [
            run for run in waiting if run.plan.test_id not in self._choosers or run.number or run.plan.key in chosen
        ]
