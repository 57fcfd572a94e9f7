"""Selection of the runs that may be submitted now. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping

from cloudai_mbridge.runner.context import Phase, Tracked


class Schedule:
    """The order between tests, the limit on active runs, the budget of GPU time."""

    def __init__(self, runs: Iterable[Tracked], max_parallel: int | None, max_gpu_hours: float | None) -> None:
        self._runs = list(runs)
        self._max_parallel = max_parallel
        self._max_gpu_s = None if max_gpu_hours is None else max_gpu_hours * 3600

    def ready(self, now: float) -> list[Tracked]:
        """Return, in order, the waiting runs that wait for nothing any more."""
        # a test whose points were all rejected has no runs, and no test waits for it
        open_tests = {run.plan.test_id for run in self._runs if run.phase is not Phase.ENDED}
        unstarted = {run.plan.test_id for run in self._runs if not run.has_started}
        gate_is_open = all(run.phase is Phase.ENDED for run in self._runs if run.plan.goes_first)
        return [
            run
            for run in self._runs
            if run.phase is Phase.WAITING
            and now >= run.not_before
            and (gate_is_open or run.plan.goes_first)
            and open_tests.isdisjoint(run.plan.after_completion)
            and unstarted.isdisjoint(run.plan.after_start)
        ]

    def past_end_dependency(self) -> list[Tracked]:
        """Return the runs that were to end with a test that has ended."""
        ongoing = [run for run in self._runs if run.phase is not Phase.ENDED]
        ended = {run.plan.test_id for run in self._runs} - {run.plan.test_id for run in ongoing}
        return [run for run in ongoing if not ended.isdisjoint(run.plan.end_with)]

    def free_slots(self, parallel_of: Mapping[str, int]) -> int | None:
        """Return how many more runs may be active, None for any number.

        parallel_of: token of a submission -> how many of its runs may run at a time.
        """
        if self._max_parallel is None:
            return None
        tokens = Counter(run.token for run in self._runs if run.phase in (Phase.ACTIVE, Phase.UNSURE))
        return self._max_parallel - sum(min(count, parallel_of.get(token, count)) for token, count in tokens.items())

    def affordable(self, runs: Iterable[Tracked]) -> list[Tracked]:
        """Return the first of the runs that the budget allows, at the most that they may use."""
        if self._max_gpu_s is None:
            return list(runs)
        active = (run.most_gpu_s for run in self._runs if run.phase in (Phase.ACTIVE, Phase.UNSURE))
        left = self._max_gpu_s - sum(run.gpu_s for run in self._runs) - sum(active)
        chosen: list[Tracked] = []
        for run in runs:
            left -= run.most_gpu_s
            if left < 0:
                break
            chosen.append(run)
        return chosen
