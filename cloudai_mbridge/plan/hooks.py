"""Hooks: the tests of the scenarios that pre_test and post_test name."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.loading.load import LoadedScenario
from cloudai_mbridge.plan.run_plan import RunPlan


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
