"""Jobs of attempts that were given up. None of them trains, since the runner holds their claims; they are cancelled."""

import time
from collections.abc import Iterable, Iterator

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.runner.context import RunnerContext
from cloudai_mbridge.schedulers.interface import Job, Submission

# The longer nothing has turned up, the less often the scheduler is queried.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 15.0, 300.0


class Strays:
    """Looks for the jobs of withdrawn attempts as long as this process runs, and cancels them."""

    def __init__(self, context: RunnerContext) -> None:
        self._context = context
        self._runs: dict[str, tuple[RunPlan, ...]] = {}
        self._pause_s = _FIRST_PAUSE_S
        self._asked_at = float("-inf")

    def add(self, token: str, runs: Iterable[RunPlan]) -> None:
        """Look for the jobs of these runs, too."""
        self._runs[token] = (*self._runs.get(token, ()), *runs)
        self._pause_s = _FIRST_PAUSE_S

    def cancel(self, *, at_once: bool = False) -> None:
        """Cancel jobs that have turned up since the last query, if that was long ago, or at once."""
        now = time.monotonic()
        if not self._runs or (now - self._asked_at < self._pause_s and not at_once):
            return
        self._asked_at, self._pause_s = now, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        try:
            for submissions in self._rounds():
                self._cancel(submissions)
        except ToolFailure as error:
            self._pause_s = _FIRST_PAUSE_S
            self._context.tolerate(error)

    def _rounds(self) -> Iterator[list[Submission]]:
        """Yield the submissions in as few groups as there are withdrawn attempts of one run."""
        left = [Submission(token, runs) for token, runs in self._runs.items()]
        while left:
            chosen: list[Submission] = []
            keys: set[str] = set()
            for submission in left:
                if keys.isdisjoint(own := {run.key for run in submission.runs}):
                    keys |= own
                    chosen.append(submission)
            left = [submission for submission in left if submission not in chosen]
            yield chosen

    def _cancel(self, submissions: list[Submission]) -> None:
        root = self._context.root
        found = self._context.scheduler.find(submissions, root)
        late = [
            Job(run.key, found[run.key], submission.token, root / run.key, run.array_index)
            for submission in submissions
            for run in submission.runs
            if run.key in found
        ]
        if not late:
            return
        ids = ", ".join(sorted(found.values()))
        text = f"cancelling {ids}: submitted after it had been given up"
        self._context.observer.notice(text)
        self._context.journal.note(text)
        self._context.scheduler.cancel(late)
        for job in late:
            self._runs[job.token] = tuple(run for run in self._runs[job.token] if run.key != job.key)
            if not self._runs[job.token]:
                del self._runs[job.token]
