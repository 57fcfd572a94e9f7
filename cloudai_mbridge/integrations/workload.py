"""The MegatronBridge workload under CloudAI's names: definition, constraints, success, metrics.

For programs that use the workload themselves. The command line goes through `pipeline`, whose verdict is stricter
than `was_run_successful`.
"""

from dataclasses import dataclass
from typing import Any

from cloudai_mbridge import models
from cloudai_mbridge.constraints import check
from cloudai_mbridge.logs import extract_mbridge_metrics, stream_mbridge_metrics
from cloudai_mbridge.logs.tail import last_lines
from cloudai_mbridge.megatron_bridge.release import MOUNT, megatron_bridge_of
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import NEMO_RUN, GitRepo


@dataclass(frozen=True)
class DockerImage:
    """A container image by its address."""

    url: str


@dataclass(frozen=True)
class PythonExecutable:
    """The Python of an environment into which a repository is installed."""

    git_repo: GitRepo


LAUNCHER_LOG = "cloudai_megatron_bridge_launcher.log"
_TAIL = 40

MegatronBridgeCmdArgs = models.MegatronBridgeCmdArgs

__all__ = ["JobStatusResult", "MegatronBridgeCmdArgs", "MegatronBridgeTestDefinition", "extract_mbridge_metrics"]


@dataclass(frozen=True)
class JobStatusResult:
    """Whether a run succeeded, and if not, why."""

    is_successful: bool
    error_message: str = ""


class MegatronBridgeTestDefinition(models.TestDefinition):
    """A test definition with CloudAI's questions answered."""

    __test__ = False

    @property
    def docker_image(self) -> DockerImage:
        image = self.cmd_args.container_image  # type: ignore[attr-defined]
        return DockerImage((image[0] if isinstance(image, list) else image) or "")

    @property
    def python_executable(self) -> PythonExecutable:
        """The environment that runs Megatron-Bridge's launcher."""
        return PythonExecutable(self.nemo_run_repo or NEMO_RUN)

    @property
    def megatron_bridge_repo(self) -> GitRepo:
        """The Megatron-Bridge repository among `git_repos`, mounted at the path that the launcher expects.

        ValueError: `git_repos` has none.
        """
        if (repo := megatron_bridge_of(self)) is None:
            raise ValueError(
                f"git_repos: Megatron-Bridge is missing; pin it with [[git_repos]] (url, commit, mount_as = {MOUNT!r})"
            )
        return repo if repo.mount_as else repo.model_copy(update={"mount_as": MOUNT})

    @property
    def installables(self) -> list[DockerImage | PythonExecutable | GitRepo]:
        """The image if one is named, the launcher's environment, and Megatron-Bridge."""
        image = [self.docker_image] if self.docker_image.url else []
        return [*image, self.python_executable, self.megatron_bridge_repo]

    def constraint_check(self, tr: Any = None, system: System | None = None) -> bool:
        """Return whether the point satisfies rules C01-C18. `tr` is part of CloudAI's signature, and is not read.

        TypeError: an argument is still a list; expand the sweep first.
        """
        values = {name: getattr(self.cmd_args, name) for name in self.cmd_args.model_fields_set}
        lists = sorted(name for name, value in values.items() if isinstance(value, list))
        if axes := [name for name in lists if f"cmd_args.{name}" not in self.dse_excluded_args]:
            raise TypeError(f"cmd_args: {', '.join(axes)}: still lists; expand the sweep first")
        result = check(ResolvedCmdArgs.model_validate(values), system)
        return not any(violation.rule_id.startswith("C") for violation in result.violations)

    def was_run_successful(self, tr: Any) -> JobStatusResult:
        """Return success if the launcher's log contains at least one record, as in the reference."""
        log = tr.output_path / LAUNCHER_LOG
        if not log.is_file():
            return JobStatusResult(False, f"Megatron-Bridge launcher log not found in {tr.output_path}.")
        times, _ = stream_mbridge_metrics(log)
        if times:
            return JobStatusResult(True)
        tail = "\n".join(last_lines(log, _TAIL))
        return JobStatusResult(False, f"no step-time record in {log}; its last {_TAIL} lines:\n{tail}")
