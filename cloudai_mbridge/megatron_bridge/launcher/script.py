"""The script around Megatron-Bridge's launcher. It runs on a host with Slurm's commands, until the job has ended.

It starts in the run's directory, names that directory's files relatively, and the installed ones absolutely.
"""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from cloudai_mbridge.files.run_files import POINT_FILES
from cloudai_mbridge.megatron_bridge.launcher.command_line import Word, clone_path, launcher_path, launcher_words
from cloudai_mbridge.megatron_bridge.launcher.plan import LauncherRun, UpstreamPlan
from cloudai_mbridge.megatron_bridge.pins import install_root, venv_path
from cloudai_mbridge.models.system import SlurmSystem

# Read when a container is created, before the job's own shell sets anything, so sbatch must inherit them.
_CONTAINER_VARIABLES = ("MELLANOX_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_VISIBLE_DEVICES")

_LOG, _JOB_ID, _EXIT = POINT_FILES.launcher_log, POINT_FILES.slurm_job_id, POINT_FILES.exit_code
# As sbatch and NeMo-Run write it. The same expression in the syntax of grep and of Python.
_GREP_JOB_ID = "(submitted batch job|job id)[: ]+[0-9]+"
_PYTHON_JOB_ID = re.compile(rb"(?:submitted batch job|job id)[: ]+([0-9]+)", re.IGNORECASE)


def render_launcher_script(plan: LauncherRun, system: SlurmSystem, claim: Iterable[str]) -> str:
    """Render the script that starts the launcher, keeps its log and its exit code, and finds the job's id.

    claim: lines that end the script unless it holds its attempt's claim.
    """
    clone, python, launcher = (
        shlex.quote(str(find(plan.of_launcher, system))) for find in (clone_path, python_path, launcher_path)
    )
    lines = [
        "#!/bin/bash",
        f"# mbridge run {plan.key}",
        *claim,
        "set -u",
        *(f"export {name}={shlex.quote(plan.env[name])}" for name in _CONTAINER_VARIABLES if name in plan.env),
        f'export NEMORUN_HOME="$PWD/{POINT_FILES.nemorun_home}"',
        'mkdir -p "$NEMORUN_HOME"',
        f'_mbridge_starter="$PWD/{POINT_FILES.launcher_starter}"',
        "# in the clone, because NeMo-Run packages the repository that it is started in",
        "(",
        f'  cd {clone} && exec {python} "$_mbridge_starter" \\',
        f"    {launcher} \\",
        *_argument_lines(launcher_words(plan, system), len(plan.of_launcher.overrides)),
        f") > {_LOG} 2>&1",
        "_mbridge_exit=$?",
        "# the last one: the launcher submits again what failed by bad luck",
        f"_mbridge_job=$(grep -aEio {shlex.quote(_GREP_JOB_ID)} {_LOG} \\",
        "  | tail -n 1 | grep -Eo '[0-9]+$')",
        'if [ -n "$_mbridge_job" ]; then',
        f'  echo "$_mbridge_job" > {_JOB_ID}',
        '  echo "Submitted batch job $_mbridge_job"',
        "else",
        f'  echo "the launcher submitted no job and exited with $_mbridge_exit; see {_LOG}" >&2',
        "  _mbridge_exit=1",
        "fi",
        f'echo "$_mbridge_exit" > {_EXIT}',
        'exit "$_mbridge_exit"',
    ]
    return "\n".join(lines) + "\n"


def python_path(plan: UpstreamPlan, system: SlurmSystem) -> Path:
    """Return the Python of the installed NeMo-Run environment."""
    return venv_path(install_root(system), plan.nemo_run.url, plan.nemo_run.commit) / "bin" / "python"


def find_job_ids(log: bytes) -> list[str]:
    """Return the ids of the jobs that the launcher reports as submitted, in order."""
    return list(dict.fromkeys(found.decode() for found in _PYTHON_JOB_ID.findall(log)))


def _argument_lines(words: list[Word], num_overrides: int) -> Iterable[str]:
    """Write each flag and its values on a separate line, and the overrides last."""
    groups: list[list[Word]] = []
    for i, word in enumerate(words):
        if not groups or re.match(r"-(?![0-9.])", word.text) or i >= len(words) - num_overrides:
            groups.append([])
        groups[-1].append(word)
    for i, group in enumerate(groups):
        yield f"    {' '.join(map(str, group))}" + (" \\" if i + 1 < len(groups) else "")
