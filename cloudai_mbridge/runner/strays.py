"""Jobs of attempts that were given up. None of them trains, since the runner holds their claims; they are cancelled."""

import time
from collections.abc import Iterable

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.jobs import Job, Submission
from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.runner.board import Board

_LOOK_EVERY_S = 15.0


class Strays:
    """Looks for the jobs of withdrawn attempts as long as this process runs, and cancels them."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._runs: dict[str, tuple[RunPlan, ...]] = {}
        self._looked_at = float("-inf")

    def add(self, token: str, runs: Iterable[RunPlan]) -> None:
        """Look for the jobs of these runs, too."""
        self._runs[token] = (*self._runs.get(token, ()), *runs)

    def cancel(self) -> None:
        """Cancel what has turned up since the last look."""
        if not self._runs or time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()
        try:
            for token, runs in list(self._runs.items()):
                self._cancel(token, runs)
        except ToolFailure as error:
            self._board.bear(error)

    def _cancel(self, token: str, runs: Iterable[RunPlan]) -> None:
        found = self._board.scheduler.find([Submission(token, tuple(runs))], self._board.root)
        if not found:
            return
        ids = ", ".join(sorted(found.values()))
        self._board.observer.notice(f"cancelling {ids}: submitted after all, when it had been given up")
        self._board.journal.note(f"cancelling {ids}, submitted as {token} and given up since")
        late = [run for run in runs if run.key in found]
        root = self._board.root
        self._board.scheduler.cancel(
            [Job(run.key, found[run.key], token, root / run.key, run.array_index) for run in late]
        )
        self._runs[token] = tuple(run for run in runs if run.key not in found)
        if not self._runs[token]:
            del self._runs[token]
