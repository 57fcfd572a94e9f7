"""A point on a system, ready to run: everything decided, nothing done yet."""

from cloudai_mbridge.plan.paths import POINT_FILES, ROOT_FILES
from cloudai_mbridge.plan.run_plan import RejectedPoint, Repo, RunPlan, SweepPlan, UpstreamPlan

__all__ = ["POINT_FILES", "ROOT_FILES", "RejectedPoint", "Repo", "RunPlan", "SweepPlan", "UpstreamPlan"]
