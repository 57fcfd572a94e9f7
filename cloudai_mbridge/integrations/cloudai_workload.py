"""The workload as CloudAI's classes: test definition, Slurm command, report. Imported by `cloudai.register` only.

A test run's output directory becomes the root of a run of ours, with plan, scripts, journal and report.json in it; its
one point runs in a directory below. CloudAI expands sweeps, submits and waits.
"""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

from cloudai.core import METRIC_ERROR, CommandGenStrategy, JobStatusResult, ReportGenerationStrategy, TestDefinition
from pydantic import ConfigDict, ValidationError

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.integrations.cloudai import TEMPLATE
from cloudai_mbridge.launch import write_plan, write_runs
from cloudai_mbridge.launch.script import PYTHON_VARIABLE
from cloudai_mbridge.launch.toml_text import render_toml
from cloudai_mbridge.models import MegatronBridgeCmdArgs, MetricsConfig, Scenario, SlurmSystem
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.load import LoadedScenario, LoadedTest
from cloudai_mbridge.models.test_definition import TEMPLATE as OUR_TEMPLATE
from cloudai_mbridge.models.test_definition import MegatronBridgeTestDefinition
from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES, RunPlan, SweepPlan
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.report import PointReport, build_report, write_report
from cloudai_mbridge.runner import Journal
from cloudai_mbridge.slurm.parsing import status_from_marker
from cloudai_mbridge.verdict import Verdict

_SHARED = {"name", "description", "extra_env_vars", "extra_cmd_args", "extra_container_mounts", "nsys", "metrics"}
# CloudAI's system has more, and some of the same name with another content
_SYSTEM = (
    *("name", "default_partition", "account", "distribution", "mpi", "gpus_per_node", "container_mount_home"),
    *("extra_srun_args", "extra_sbatch_args", "global_env_vars"),
)


class EmbeddedCmdArgs(MegatronBridgeCmdArgs):
    """The arguments of MegatronBridge; not frozen, because CloudAI sets a sweep's values on them."""

    model_config = ConfigDict(frozen=False)

    launcher: Literal[Launcher.EMBEDDED] = Launcher.EMBEDDED


class EmbeddedTestDefinition(TestDefinition):
    """A benchmark of the embedded Megatron-Core loop."""

    __test__ = False

    cmd_args: EmbeddedCmdArgs
    metrics: MetricsConfig = MetricsConfig()

    def constraint_check(self, tr: Any, system: Any = None) -> bool:
        """Return whether no rule rejects the point, placed on the system."""
        return not _plan(tr, system, self).rejected

    def was_run_successful(self, tr: Any) -> JobStatusResult:
        """Judge as `mbridge run` does: exit code, every step in the log, every loss finite."""
        try:
            point = _judged(tr.output_path)
        except BadInput as error:
            return JobStatusResult(is_successful=False, error_message=str(error))
        return JobStatusResult(is_successful=point.verdict is Verdict.SUCCESS, error_message="; ".join(point.reasons))


class EmbeddedSlurmStrategy(CommandGenStrategy):
    """Write the batch script of `mbridge run`, and have CloudAI submit it."""

    def gen_exec_command(self) -> str:
        """Write the run's files; return the sbatch command, which says "Submitted batch job N" as CloudAI expects.

        Raises:
            BadInput: a rule rejects the point, or something asked for is not implemented.
        """
        root = Path(self.test_run.output_path).absolute()
        plan = _plan(self.test_run, self.system)
        run = _the_run(plan)
        root.mkdir(parents=True, exist_ok=True)
        write_runs(plan, _system(self.system, self.test_run), root)
        write_plan(plan, root)
        journal = Journal(root / ROOT_FILES.journal)
        journal.plan([run.key])
        journal.close()
        directory = root / run.key
        sbatch = ["sbatch", f"--chdir={directory}", str(directory / POINT_FILES.slurm_script)]
        return shlex.join(["env", f"{PYTHON_VARIABLE}={sys.executable}", *sbatch])

    def store_test_run(self) -> None:
        """Write the point as a test definition, without credentials."""
        run = _the_run(_plan(self.test_run, self.system))
        (Path(self.test_run.output_path) / self.TEST_RUN_DUMP_FILE_NAME).write_text(
            render_toml(run.definition), encoding="utf-8"
        )


class EmbeddedReport(ReportGenerationStrategy):
    """Write report.json and report.txt as `mbridge run` does."""

    metrics: ClassVar[list[str]] = ["default", "step-time", "tflops-per-gpu"]

    @property
    def results_file(self) -> Path:
        return Path(self.test_run.output_path) / ROOT_FILES.report

    def can_handle_directory(self) -> bool:
        return (Path(self.test_run.output_path) / ROOT_FILES.journal).is_file()

    def generate_report(self) -> None:
        """Judge the run from its files and write the reports."""
        _judged(self.test_run.output_path)

    def get_metric(self, metric: str) -> float:
        """Return a mean after the warm-up, or CloudAI's METRIC_ERROR; of a failed run always the latter."""
        if not self.can_handle_directory():
            return float(METRIC_ERROR)
        point = _judged(self.test_run.output_path)
        measured = {
            "default": point.metrics and point.metrics.step_time_s,
            "step-time": point.metrics and point.metrics.step_time_s,
            "tflops-per-gpu": point.metrics and point.metrics.tflops_per_gpu,
        }.get(metric)
        return measured.mean if measured and point.verdict is Verdict.SUCCESS else float(METRIC_ERROR)


def _plan(tr: Any, system: Any, definition: Any = None) -> SweepPlan:
    """Plan CloudAI's test run.

    Raises:
        BadInput: it asks for what this tool refuses.
    """
    if getattr(tr, "pre_test", None) or getattr(tr, "post_test", None):
        raise BadInput(f"{tr.name}: {TEMPLATE} runs no pre_test or post_test; remove them")
    try:
        ours = _definition(tr.test if definition is None else definition)
        scenario = Scenario.model_validate({"name": tr.name, "Tests": [_test_run(tr, ours)]})
        loaded = LoadedScenario(scenario, [LoadedTest(scenario.tests[0], ours)])
        return build_plan(loaded, _system(system, tr))
    except ValidationError as error:
        raise BadInput(f"{tr.name}: {'; '.join(_explain(error))}") from None


def _definition(theirs: Any) -> MegatronBridgeTestDefinition:
    data = theirs.model_dump(mode="json", include=_SHARED, exclude_none=True)
    args = theirs.cmd_args.model_dump(mode="json", exclude_unset=True)
    # git_repos stay CloudAI's: it clones them, and the embedded loop needs none
    return MegatronBridgeTestDefinition.model_validate(
        {**data, "test_template_name": OUR_TEMPLATE, "cmd_args": {**args, "launcher": Launcher.EMBEDDED}}
    )


def _test_run(tr: Any, definition: MegatronBridgeTestDefinition) -> dict[str, Any]:
    return {
        "id": tr.name,
        "test_name": definition.name,
        "num_nodes": tr.num_nodes,
        "nodes": list(tr.nodes),
        "exclude_nodes": list(getattr(tr, "exclude_nodes", None) or []),
        "time_limit": tr.time_limit,
    }


def _system(theirs: Any, tr: Any) -> SlurmSystem:
    found = {name: value for name in _SYSTEM if (value := getattr(theirs, name, None)) is not None}
    srun_args = [text for text in (found.get("extra_srun_args"), getattr(tr, "extra_srun_args", None)) if text]
    partition = found.setdefault("default_partition", "none")
    return SlurmSystem.model_validate(
        {
            "name": "cloudai",
            **found,
            "scheduler": "slurm",
            "partitions": [{"name": partition}],
            "extra_srun_args": " ".join(srun_args) or None,
        }
    )


def _the_run(plan: SweepPlan) -> RunPlan:
    """Return the plan's only run."""
    if plan.rejected:
        raise BadInput("; ".join(str(violation) for violation in plan.rejected[0].violations))
    if len(plan.runs) != 1:
        raise BadInput(f"{plan.scenario}: still a sweep of {len(plan.runs)} points; CloudAI has to expand it first")
    (run,) = plan.runs
    if run.secret_env:
        names = ", ".join(sorted(run.secret_env))
        raise BadInput(
            f"{plan.scenario}: CloudAI would write {names} into files; remove it from the TOML and export it"
        )
    return run


def _judged(output_path: Path) -> PointReport:
    """Write down how the job ended, by its own marker, and write the reports."""
    root = Path(output_path).absolute()
    report = build_report(root)
    (point,) = report.points
    marker = root / point.key / POINT_FILES.exit_code
    journal = Journal(root / ROOT_FILES.journal)
    status = status_from_marker(marker.read_text() if marker.exists() else None)
    if not point.attempts:  # CloudAI has submitted it
        journal.intend([(point.key, 1)], OUR_TEMPLATE)
    journal.saw(point.key, 1, status)
    journal.close()
    report = build_report(root)
    write_report(report, root)
    (point,) = report.points
    return point


def _explain(error: ValidationError) -> Iterable[str]:
    for mistake in error.errors():
        yield f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}"
