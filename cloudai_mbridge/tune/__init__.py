"""The layouts of a model on a number of GPUs: ranked by prediction, or searched by measuring them."""

from pathlib import Path

from cloudai_mbridge.plan import ScenarioPlan
from cloudai_mbridge.report import judge_in
from cloudai_mbridge.runner.context import Chooser


def choosers_for(plan: ScenarioPlan, root: Path) -> dict[str, Chooser]:
    """Return the searches of tests with agent = "tune", by test."""
    if all(run.search is None for run in plan.runs):
        return {}
    from cloudai_mbridge.tune.measured_search import choosers_of  # numpy and scipy, for a search only

    return choosers_of(plan, judge_in(root))
