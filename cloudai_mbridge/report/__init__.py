"""Reports of runs: report.json is the contract, everything else is rendered from it."""

from cloudai_mbridge.report.build import build_report, judge_in
from cloudai_mbridge.report.model import PointReport, RunReport
from cloudai_mbridge.report.write import write_report

__all__ = ["PointReport", "RunReport", "build_report", "judge_in", "write_report"]
