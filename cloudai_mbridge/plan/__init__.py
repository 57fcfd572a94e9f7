"""A point on a system, ready to run: everything decided, nothing done yet."""

from cloudai_mbridge.files.run_files import POINT_FILES, ROOT_FILES
from cloudai_mbridge.plan.run_plan import RejectedPoint, RunPlan, ScenarioPlan

__all__ = ["POINT_FILES", "ROOT_FILES", "RejectedPoint", "RunPlan", "ScenarioPlan"]
