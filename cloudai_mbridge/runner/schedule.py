"""What may be submitted now. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping

from cloudai_mbridge.runner.context import Phase, Tracked


class Schedule:
    """The order between tests, the limit on active runs, the budget of GPU time."""

    def __init__(self, runs: Iterable[Tracked], max_parallel: int | None, max_gpu_hours: float | None) -> None:
        self._runs = list(runs)
        self._max_parallel = max_parallel
        self._max_gpu_s = None if max_gpu_hours is None else max_gpu_hours * 3600
        self._of_test: dict[str, list[Tracked]] = {}
        for run in self._runs:
            self._of_test.setdefault(run.plan.test_id, []).append(run)
        self._pre_tests = [run for run in self._runs if run.plan.goes_first]

    def ready(self, now: float) -> list[Tracked]:
        """Return, in order, the waiting runs that wait for nothing any more."""
        ended = {test for test, runs in self._of_test.items() if all(run.phase is Phase.ENDED for run in runs)}
        started = {test for test, runs in self._of_test.items() if all(run.has_started for run in runs)}
        gate_is_open = all(run.phase is Phase.ENDED for run in self._pre_tests)
        return [
            run
            for run in self._runs
            if run.phase is Phase.WAITING
            and now >= run.not_before
            and (gate_is_open or run.plan.goes_first)
            and _without_unknown(run.plan.after_completion, self._of_test) <= ended
            and _without_unknown(run.plan.after_start, self._of_test) <= started
        ]

    def outlived(self) -> list[Tracked]:
        """Return the runs that were to end with a test that has ended."""
        ended = {test for test, runs in self._of_test.items() if all(run.phase is Phase.ENDED for run in runs)}
        return [run for run in self._runs if run.phase is not Phase.ENDED and ended & set(run.plan.end_with)]

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
        chosen: list[Tracked] = []
        left = self._gpu_s_left()
        for run in runs:
            if left is not None:
                left -= run.most_gpu_s
                if left < 0:
                    break
            chosen.append(run)
        return chosen

    def _gpu_s_left(self) -> float | None:
        if self._max_gpu_s is None:
            return None
        active = (run.most_gpu_s for run in self._runs if run.phase in (Phase.ACTIVE, Phase.UNSURE))
        return self._max_gpu_s - sum(run.gpu_s for run in self._runs) - sum(active)


def _without_unknown(tests: Iterable[str], known: Mapping[str, object]) -> set[str]:
    """Return the tests that have runs; one whose points were all rejected has nothing to wait for."""
    return {test for test in tests if test in known}
