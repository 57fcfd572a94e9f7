"""The workload on CloudAI's systems: checks and submission.

Imported by `cloudai.register` only.
"""

import os
import shlex
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import toml
from cloudai.core import CommandGenStrategy, Registry
from cloudai.models.scenario import TestRunDetails
from cloudai.systems.slurm import SingleSbatchRunner, SlurmCommandGenStrategy

from cloudai_mbridge.integrations.cloudai_point import prepare, refuse
from cloudai_mbridge.integrations.cloudai_workload import EmbeddedTestDefinition
from cloudai_mbridge.launch.script import PYTHON_VARIABLE
from cloudai_mbridge.plan import POINT_FILES

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
        script = Path(self.test_run.output_path).absolute() / BATCH_SCRIPT
        script.write_text(self._batch_script(), encoding="utf-8")
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

    def _batch_script(self) -> str:
        directives = [line for line in self._script().splitlines() if line.startswith("#SBATCH")]
        if not self.system.supports_gpu_directives:
            directives = [line for line in directives if not line.startswith("#SBATCH --gpus-per-node")]
        self._add_reservation(directives)
        commands = [self._metadata(), f"exec bash {POINT_FILES.slurm_script}"]
        return "\n".join(["#!/bin/bash", *directives, *commands]) + "\n"

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
