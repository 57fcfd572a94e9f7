"""Launch runs through NeMo-Run: `executor = "nemo_run"` in a system file.

NeMo-Run 0.11 pastes environment values, arguments, srun options and paths unquoted into shell lines, substitutes names
in some of them, and without a container replaces the text "/nemo_run" anywhere in its batch script. So it gets none
of these: variables and srun options are quoted in scripts of ours, which it starts or reads, and its own directory is
named relatively to the run's. It gets sbatch options only, which it quotes. Credentials bypass it in the environment.

NeMo-Run itself is imported by `nemo_run_driver` only, in a process per run.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.integrations.nemo_run_driver import CONFIG, SRUN_ARRAY
from cloudai_mbridge.launch.script import (
    CPUS_LINE,
    EPILOGUE,
    LOCAL_START,
    PYTHON_VARIABLE,
    SLURM_START,
    TRAINING,
    container_guard,
    escaped_for_sbatch,
    exports,
    interpreter,
    mount_options,
    sbatch_options,
    srun_options,
)
from cloudai_mbridge.launch.write import write_file
from cloudai_mbridge.models.shell import expand
from cloudai_mbridge.models.system import SlurmSystem, System
from cloudai_mbridge.plan import POINT_FILES, RunPlan, ScenarioPlan
from cloudai_mbridge.schedulers.interface import Submission
from cloudai_mbridge.schedulers.slurm import SlurmClient
from cloudai_mbridge.schedulers.slurm.commands import parse_submitted, run_command
from cloudai_mbridge.schedulers.slurm.jobs import failure, job_env, job_name_of

TASK = "task.sh"
SETUP = "setup.sh"
INSTALL = "pip install 'cloudai-mbridge[nemo-run]'"
SUBMIT_TIMEOUT_S = 180
_DRIVER = ("-P", "-m", "cloudai_mbridge.integrations.nemo_run_driver")
_REPLACED = "/nemo_run"
# Variables that torchrun sets for its ranks; a variable of the run must not override them.
_TORCHRUN_OWNS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def require_nemo_run() -> None:
    """Raise ToolFailure unless NeMo-Run is installed."""
    if (spec := find_spec("nemo_run")) is None or spec.origin is None:
        raise ToolFailure(f'executor = "nemo_run": NeMo-Run is not installed here; {INSTALL}')


class NemoRunSlurmClient(SlurmClient):
    """Slurm, with NeMo-Run to submit runs of the embedded loop; the upstream launcher calls NeMo-Run itself."""

    def preflight(self) -> None:
        """Also check that NeMo-Run is installed and can pass the system's options."""
        require_nemo_run()
        for option in self._system.extra_sbatch_args:
            _named_option(option)
        super().preflight()

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        return [(run,) for run in runs]

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        """Start a run through NeMo-Run, from the files of `write_scripts`."""
        (run,) = submission.runs
        options = {"job_name": job_name_of(submission, root, self._system)}
        if submission.exclude_nodes:
            options["exclude"] = ",".join(sorted({*run.exclude_nodes, *submission.exclude_nodes}))
        answer = run_command(
            *(sys.executable, *_DRIVER, json.dumps(options)),
            cwd=root / run.key,
            env=job_env(submission),
            keep_open=submission.keep_open,
            timeout_s=SUBMIT_TIMEOUT_S,
            name="NeMo-Run's driver",
        )
        job_id = parse_submitted(answer.stdout)
        if answer.returncode != 0 or job_id is None:
            raise failure(answer, before="NeMo-Run: ")
        return {run.key: job_id}


def write_scripts(plan: ScenarioPlan, system: System, root: Path) -> None:
    """Replace the scripts of `write_runs` by NeMo-Run's input.

    BadInput: an option cannot be handed to NeMo-Run unharmed.
    """
    for run in plan.runs:
        if run.launcher.has_script:
            (root / run.key / POINT_FILES.slurm_script).unlink(missing_ok=True)
            for name, text in render(run, system).items():
                write_file(root / run.key / name, text)


def render(plan: RunPlan, system: System) -> dict[str, str]:
    """Return the files that NeMo-Run and its driver read: name -> text. No file holds a credential."""
    if isinstance(system, SlurmSystem):
        config: dict[str, Any] = {"executor": "slurm", "task": TASK, "setup": SETUP, "sbatch": _sbatch(plan, system)}
        scripts = {SETUP: _setup_script(plan, system), TASK: _node_script(plan, system)}
    else:
        config = {"executor": "local", "task": TASK, "ranks": plan.ranks_per_node, "python": system.python_executable}
        scripts = {TASK: _rank_script(plan, system), POINT_FILES.local_script: _local_script(plan)}
    return {CONFIG: json.dumps(config, indent=2) + "\n", **scripts}


# options that NeMo-Run or its driver sets
_ITS_OWN = ("requeue", "no_requeue", "open_mode")


def _sbatch(plan: RunPlan, system: SlurmSystem) -> dict[str, str | bool]:
    """Return the options of our own batch script as NeMo-Run takes them, except NeMo-Run's own.

    BadInput: an option has no long name, or holds the text that NeMo-Run replaces.
    """
    options = dict(_named_option(escaped_for_sbatch(option)) for option in sbatch_options(plan, system))
    for name, value in options.items():
        if _REPLACED in str(value):
            raise BadInput(f"sbatch option {name}: {value!r}: NeMo-Run would replace {_REPLACED!r} in it; rename that")
    return {name: value for name, value in options.items() if name not in _ITS_OWN}


def _named_option(option: str) -> tuple[str, str | bool]:
    """Split --name=value, as NeMo-Run takes it: the name in snake case, True for an option without a value."""
    name, separator, value = option.removeprefix("--").partition("=")
    if not option.startswith("--") or not name.replace("-", "").isalnum():
        raise BadInput(f"extra_sbatch_args: {option!r}: NeMo-Run takes --name=value or --name only; write it so")
    return name.replace("-", "_"), value if separator else True


def _local_script(plan: RunPlan) -> str:
    """Render the job of this machine: the driver, which waits for NeMo-Run's LocalExecutor."""
    return _script(
        f"# mbridge run {plan.key}: NeMo-Run starts torchrun, torchrun starts {TASK} for every rank",
        *LOCAL_START,
        f'"${PYTHON_VARIABLE}" {shlex.join(_DRIVER)}',
        *EPILOGUE,
    )


def _rank_script(plan: RunPlan, system: System) -> str:
    """Render the script that NeMo-Run's torchrun starts once per rank."""
    return _script(
        f"# mbridge run {plan.key}: one rank, started by NeMo-Run's torchrun",
        "set -u",
        *exports(plan, without=_TORCHRUN_OWNS),
        interpreter(plan, system),
        f'exec "$_mbridge_python" {shlex.join(TRAINING)} >> {POINT_FILES.stdout} 2>> {POINT_FILES.stderr}',
    )


def _setup_script(plan: RunPlan, system: SlurmSystem) -> str:
    """Render the file that NeMo-Run's batch script reads before its srun; `head_node` is a variable of that script.

    "all" makes srun write to the batch script's output: NeMo-Run would name a separate file.
    """
    srun = ["--output=all", "--error=all", *srun_options(plan, system)]
    # the node's script, not this one, sets the run's variables
    mounts = [expand(mount, plan.env) for mount in plan.container_mounts]
    container = mount_options(mounts) if plan.container_image else ""
    return _script(
        f"# mbridge run {plan.key}: read by NeMo-Run's batch script",
        *SLURM_START,
        f"trap 'echo \"$?\" > {POINT_FILES.exit_code}' EXIT",
        'export MBRIDGE_HEAD_NODE="$head_node"',
        *container_guard(replace(plan, container_mounts=tuple(mounts))),
        CPUS_LINE,
        f'{SRUN_ARRAY}=(--cpus-per-task="$_mbridge_cpus" {shlex.join(srun)} {container})',
    )


def _node_script(plan: RunPlan, system: System) -> str:
    """Render the script that NeMo-Run's srun starts once per node: a torchrun, rendezvous on the first node."""
    torchrun = ["--nnodes", str(plan.num_nodes), "--nproc-per-node", str(plan.ranks_per_node)]
    return _script(
        f"# mbridge run {plan.key}: one node, started by NeMo-Run's srun",
        "set -u",
        'cd "$SLURM_SUBMIT_DIR" || exit',
        *exports(plan),
        interpreter(plan, system),
        'export PET_NODE_RANK="$SLURM_NODEID"',
        "# two jobs may share a node: the port is the job's own, below the ephemeral range",
        'exec "$_mbridge_python" -m torch.distributed.run \\',
        '  --master-addr "$MBRIDGE_HEAD_NODE" --master-port "$((15000 + SLURM_JOB_ID % 15000))" \\',
        f"  {shlex.join([*torchrun, *TRAINING])}",
    )


def _script(*lines: str) -> str:
    return "\n".join(("#!/bin/bash", *lines)) + "\n"
