"""The workload as CloudAI's classes: test definition and report. Imported by `cloudai.register` only."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from cloudai.core import METRIC_ERROR, JobStatusResult, ReportGenerationStrategy, TestDefinition
from pydantic import ConfigDict, model_validator

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.integrations.cloudai_point import failed_points, is_prepared, judged, plan_of
from cloudai_mbridge.models import MegatronBridgeCmdArgs, MetricsConfig
from cloudai_mbridge.plan import ROOT_FILES
from cloudai_mbridge.verdict import Verdict


class EmbeddedCmdArgs(MegatronBridgeCmdArgs):
    """The arguments of MegatronBridge; not frozen, because CloudAI sets a sweep's values on them."""

    model_config = ConfigDict(frozen=False)

    # a plain string: CloudAI's TOML writer takes an enumeration for a list
    launcher: Literal["embedded"] = "embedded"

    @model_validator(mode="before")
    @classmethod
    def _no_blank_defaults(cls, data: Any) -> Any:
        """CloudAI writes every default out and reads it again, also blank defaults of keys that may not be blank."""
        return {key: value for key, value in data.items() if value != ""} if isinstance(data, dict) else data


class EmbeddedTestDefinition(TestDefinition):
    """A benchmark of the embedded Megatron-Core loop."""

    __test__ = False

    cmd_args: EmbeddedCmdArgs
    metrics: MetricsConfig | None = None  # None: CloudAI would write a default out, which then counts as requested

    @property
    def installables(self) -> list[Any]:
        """Nothing: the loop runs in the environment that runs CloudAI, or in the container."""
        return []

    def constraint_check(self, tr: Any, system: Any = None) -> bool:
        """Return whether no rule rejects the point, placed on the system."""
        return not plan_of(tr, system, definition=self).rejected

    def was_run_successful(self, tr: Any) -> JobStatusResult:
        """Judge as `mbridge run` does: exit code, every step in the log, every loss finite."""
        where = str(Path(tr.output_path).absolute())
        try:
            point = judged(tr.output_path)
        except BadInput as error:
            if is_prepared(tr.output_path):
                failed_points[where] = True
            return JobStatusResult(is_successful=False, error_message=str(error))
        is_good = point.verdict is Verdict.SUCCESS
        failed_points[where] = not is_good
        return JobStatusResult(is_successful=is_good, error_message="; ".join(point.reasons))


class EmbeddedReport(ReportGenerationStrategy):
    """Write report.json, report.txt and the other reports of `mbridge run`."""

    metrics: ClassVar[list[str]] = ["default", "step-time", "tflops-per-gpu"]

    @property
    def results_file(self) -> Path:
        return Path(self.test_run.output_path) / ROOT_FILES.report

    def can_handle_directory(self) -> bool:
        return is_prepared(self.test_run.output_path)

    def generate_report(self) -> None:
        """Judge the run from its files and write the reports."""
        judged(self.test_run.output_path)

    def get_metric(self, metric: str) -> Any:
        """Return a capped mean after the warm-up, or CloudAI's METRIC_ERROR, always for a failed run."""
        try:
            point = judged(self.test_run.output_path)
        except BadInput:
            return METRIC_ERROR
        name = {"default": "step_time_s", "step-time": "step_time_s", "tflops-per-gpu": "tflops_per_gpu"}.get(metric)
        statistic = getattr(point.metrics, name) if name and point.metrics else None
        return statistic.capped_mean if statistic and point.verdict is Verdict.SUCCESS else METRIC_ERROR
