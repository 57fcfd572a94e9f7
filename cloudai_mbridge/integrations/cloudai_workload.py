"""The workload as CloudAI's classes: test definition, report, checks and submission on its systems.

Imported by `cloudai.register` only.
"""

import os
import shlex
import sys
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import toml
from cloudai.core import (
    METRIC_ERROR,
    CommandGenStrategy,
    JobStatusResult,
    Registry,
    ReportGenerationStrategy,
    TestDefinition,
)
from cloudai.models.scenario import TestRunDetails
from cloudai.systems.slurm import SingleSbatchRunner, SlurmCommandGenStrategy
from pydantic import ConfigDict, model_validator

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.integrations.cloudai_point import failed_points, is_prepared, judged, plan_of, prepare, refuse
from cloudai_mbridge.launch.script import PYTHON_VARIABLE
from cloudai_mbridge.models import MegatronBridgeCmdArgs, MetricsConfig
from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES
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


BATCH_SCRIPT = "cloudai_sbatch_script.sh"  # CloudAI's name
_INTERPRETER = '"$_mbridge_python"'


def checked(runner: Any) -> Any:
    """Return a runner of CloudAI's that refuses impossible runs before it submits anything."""

    def __init__(self: Any, mode: str, system: Any, test_scenario: Any, *rest: Any, **named: Any) -> None:  # noqa: N807
        for tr in test_scenario.test_runs:
            if isinstance(tr.test, EmbeddedTestDefinition):
                refuse(tr, system)
        runner.__init__(self, mode, system, test_scenario, *rest, **named)

    return type(runner.__name__, (runner,), {"__init__": __init__, "__doc__": runner.__doc__})


class EmbeddedSlurmStrategy(SlurmCommandGenStrategy):
    """Write the batch script of `mbridge run`, and have CloudAI submit it."""

    @cached_property
    def directory(self) -> Path:
        """Directory of the point; its files are written at the first access.

        Refused: a rule rejects the point, or a requested feature is not implemented.
        """
        return prepare(self.test_run, self.system, self.get_cached_nodes_spec())

    def gen_exec_command(self) -> str:
        """Return the sbatch command, which prints "Submitted batch job N" as CloudAI expects."""
        directives = [line for line in self._script().splitlines() if line.startswith("#SBATCH")]
        if not self.system.supports_gpu_directives:
            directives = [line for line in directives if not line.startswith("#SBATCH --gpus-per-node")]
        self._add_reservation(directives)
        lines = ["#!/bin/bash", *directives, self._metadata(), f"exec bash {POINT_FILES.slurm_script}"]
        script = Path(self.test_run.output_path).absolute() / BATCH_SCRIPT
        script.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return shlex.join([*_environment(), "sbatch", f"--chdir={self.directory}", str(script)])

    def gen_srun_command(self) -> str:
        """Return the batch script's command; under --single-sbatch the script itself, in CloudAI's one job."""
        # CloudAI then puts another runner into its registry
        if issubclass(Registry().runners_map["slurm"], SingleSbatchRunner):
            files = f">> {POINT_FILES.stdout} 2>> {POINT_FILES.stderr}"
            run = shlex.join([*_environment(), "bash", POINT_FILES.slurm_script])
            return f"(cd {shlex.quote(str(self.directory))} && {run} {files})"
        return self._srun_line()

    def generate_test_command(self) -> list[str]:
        """Return the command that srun starts on every node."""
        return [_INTERPRETER + self._srun_line().partition(_INTERPRETER)[2]]

    @property
    def final_env_vars(self) -> dict[str, Any]:
        """Nothing: the point's own script sets its variables, quoted."""
        return {}

    def _container_mounts(self) -> list[str]:
        return []

    def _metadata(self) -> str:
        """Return the command that writes CloudAI's description of every node, where its script is installed."""
        output = Path(self.test_run.output_path).absolute() / "metadata"
        output.mkdir(parents=True, exist_ok=True)
        nodes, _ = self.get_cached_nodes_spec()
        options = [f"--mpi={self.mpi}", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        files = [f"--output={output / 'node-%N.toml'}", f"--error={output / 'nodes.err'}"]
        script = Path(self.system.install_path).absolute() / "slurm-metadata.sh"
        srun_args = " ".join(filter(None, (self.system.extra_srun_args, self.test_run.extra_srun_args)))
        command = ["srun", *options, *shlex.split(srun_args), *files, "bash", str(script)]
        return f"! test -e {shlex.quote(str(script))} || {shlex.join(command)}"

    def _srun_line(self) -> str:
        lines = self._script().replace("\\\n", "").splitlines()
        return next(line for line in lines if line.startswith("srun "))

    def _script(self) -> str:
        return (self.directory / POINT_FILES.slurm_script).read_text(encoding="utf-8")


class EmbeddedStandaloneStrategy(CommandGenStrategy):
    """Train on this machine, under a process that ends with CloudAI's."""

    def gen_exec_command(self) -> str:
        """Write the point's files; return the command that trains it."""
        directory = prepare(self.test_run, self.system)
        self.store_test_run()
        command = [sys.executable, "-m", "cloudai_mbridge.integrations.standalone", str(directory)]
        # CloudAI never reads the output of its command
        return f"exec {shlex.join([*_environment(), *command])} < /dev/null > /dev/null 2>&1"

    def store_test_run(self) -> None:
        """Write CloudAI's description of the test run."""
        script = str(prepare(self.test_run, self.system) / POINT_FILES.local_script)
        details = TestRunDetails.from_test_run(self.test_run, test_cmd=f"bash {script}", full_cmd=f"bash {script}")
        with (Path(self.test_run.output_path) / self.TEST_RUN_DUMP_FILE_NAME).open("w", encoding="utf-8") as file:
            toml.dump(details.model_dump(), file)


def _environment() -> list[str]:
    return ["env", f"{PYTHON_VARIABLE}={os.environ.get(PYTHON_VARIABLE, sys.executable)}"]
