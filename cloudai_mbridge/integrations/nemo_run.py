"""Launch runs through NeMo-Run: `executor = "nemo_run"` in a system file.

NeMo-Run 0.11 pastes environment values, arguments, srun options and paths unquoted into shell lines, substitutes names
in some of them, and without a container replaces the text "/nemo_run" anywhere in its batch script. So it is given none
of that: variables and srun options stand quoted in scripts of ours, which it starts or reads, and its own directory is
named relatively to the run's. What remains are sbatch options, which it quotes. Credentials travel past it in the
environment.

NeMo-Run itself is imported by `nemo_run_driver` only, in a process per run.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.integrations.nemo_run_driver import CONFIG, SRUN_ARRAY
from cloudai_mbridge.launch.script import (
    LOCAL_START,
    PYTHON_VARIABLE,
    SLURM_START,
    escaped_for_sbatch,
    exports,
    sbatch_options,
    srun_options,
)
from cloudai_mbridge.launch.write import write_file
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.plan import POINT_FILES, RunPlan, ScenarioPlan
from cloudai_mbridge.schedulers.interface import Job, Scheduler, Seen, Submission
from cloudai_mbridge.schedulers.slurm.command import Answer
from cloudai_mbridge.schedulers.slurm.parsing import parse_submitted, without_slurm_variables
from cloudai_mbridge.schedulers.slurm.submit import failure, name_of

TASK = "task.sh"
SETUP = "setup.sh"
INSTALL = "pip install 'cloudai-mbridge[nemo-run]'"
SUBMIT_TIMEOUT_S = 180
_DRIVER = ("-P", "-m", "cloudai_mbridge.integrations.nemo_run_driver")
_REPLACED = "/nemo_run"
# What torchrun tells its ranks; a variable of the run must not hide it.
_TORCHRUN_OWNS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class NemoRunClient:
    """NeMo-Run in front of a scheduler: it submits, the scheduler does everything else.

    A local run's job is the script that waits for NeMo-Run; a Slurm run's job is Slurm's. It takes runs of the embedded
    loop only: the upstream launcher calls NeMo-Run by itself.
    """

    def __init__(self, system: System, scheduler: Scheduler) -> None:
        self._system, self._scheduler = system, scheduler

    def preflight(self) -> None:
        """Check that NeMo-Run is there, that it can carry the system's options, and the scheduler's own checks."""
        if (spec := find_spec("nemo_run")) is None or spec.origin is None:
            raise ToolFailure(f'executor = "nemo_run": NeMo-Run is not installed here; {INSTALL}')
        if isinstance(self._system, SlurmSystem):
            for option in self._system.extra_sbatch_args:
                _named_option(option)
        self._scheduler.preflight()

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        """Submit every run by itself."""
        return [(run,) for run in runs]

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        """Start a run through NeMo-Run, from the files of `write_scripts`."""
        if isinstance(self._system, LocalSystem):
            return self._scheduler.submit(submission, root)
        (run,) = submission.runs
        return {run.key: _submit_slurm(submission, root / run.key)}

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        """Ask the scheduler."""
        return self._scheduler.find(submissions, root)

    def poll(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        """Ask the scheduler."""
        return self._scheduler.poll(jobs)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Cancel at the scheduler."""
        self._scheduler.cancel(jobs)

    def unhealthy_nodes(self, nodes: str) -> dict[str, str]:
        """Ask the scheduler."""
        return self._scheduler.unhealthy_nodes(nodes)

    def num_usable_nodes(self, exclude: Iterable[str]) -> int | None:
        """Ask the scheduler."""
        return self._scheduler.num_usable_nodes(exclude)


def write_scripts(plan: ScenarioPlan, system: System, root: Path) -> None:
    """Replace the scripts that `write_runs` wrote by what NeMo-Run is given.

    Raises:
        BadInput: an option cannot be handed to NeMo-Run unharmed.
    """
    for run in plan.runs:
        if run.upstream is None:
            (root / run.key / POINT_FILES.slurm_script).unlink(missing_ok=True)
            for name, text in render(run, system).items():
                write_file(root / run.key / name, text)


def render(plan: RunPlan, system: System) -> dict[str, str]:
    """Return the files that NeMo-Run and its driver read: name -> text. No file holds a credential."""
    if isinstance(system, SlurmSystem):
        config: dict[str, Any] = {"executor": "slurm", "task": TASK, "setup": SETUP, "sbatch": _sbatch(plan, system)}
        return {CONFIG: _json(config), SETUP: _setup_script(plan, system), TASK: _node_script(plan, system)}
    config = {"executor": "local", "task": TASK, "ranks": plan.ranks_per_node, "python": system.python_executable}
    return {CONFIG: _json(config), TASK: _rank_script(plan, system), POINT_FILES.local_script: _local_script(plan)}


# options that NeMo-Run gives itself, or that its driver sets
_ITS_OWN = ("requeue", "no_requeue", "open_mode")


def _sbatch(plan: RunPlan, system: SlurmSystem) -> dict[str, str | bool]:
    """Return the options of our own batch script as NeMo-Run takes them, but for its own.

    Raises:
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
        "_mbridge_exit=$?",
        f'echo "$_mbridge_exit" > {POINT_FILES.exit_code}',
        'exit "$_mbridge_exit"',
    )


def _rank_script(plan: RunPlan, system: System) -> str:
    """Render what NeMo-Run's torchrun starts once per rank."""
    return _script(
        f"# mbridge run {plan.key}: one rank, started by NeMo-Run's torchrun",
        "set -u",
        *exports(plan, without=_TORCHRUN_OWNS),
        _python(plan, system),
        f'exec "$_mbridge_python" {shlex.join(_TRAINING)} >> {POINT_FILES.stdout} 2>> {POINT_FILES.stderr}',
    )


def _setup_script(plan: RunPlan, system: SlurmSystem) -> str:
    """Render what NeMo-Run's batch script reads before its srun; `head_node` is a variable of that script.

    "all" is srun's word for its own output, which is the batch script's: NeMo-Run would name a file of its own.
    """
    srun = ["--output=all", "--error=all", *srun_options(plan, system)]
    mounts = "".join(f",{shlex.quote(mount)}" for mount in plan.container_mounts)
    container = f'--container-mounts="$PWD:$PWD"{mounts} --container-workdir="$PWD"' if plan.container_image else ""
    return _script(
        f"# mbridge run {plan.key}: read by NeMo-Run's batch script",
        *SLURM_START,
        f"trap 'echo \"$?\" > {POINT_FILES.exit_code}' EXIT",
        'export MBRIDGE_HEAD_NODE="$head_node"',
        f'{SRUN_ARRAY}=({shlex.join(srun)} --cpus-per-task="$SLURM_CPUS_ON_NODE" {container})',
    )


def _node_script(plan: RunPlan, system: System) -> str:
    """Render what NeMo-Run's srun starts once per node: a torchrun, rendezvous on the first node."""
    torchrun = ["--nnodes", str(plan.num_nodes), "--nproc-per-node", str(plan.ranks_per_node)]
    return _script(
        f"# mbridge run {plan.key}: one node, started by NeMo-Run's srun",
        "set -u",
        'cd "$SLURM_SUBMIT_DIR" || exit',
        *exports(plan),
        _python(plan, system),
        'export PET_NODE_RANK="$SLURM_NODEID"',
        "# two jobs may share a node: the port is the job's own, below the ephemeral range",
        'exec "$_mbridge_python" -m torch.distributed.run \\',
        '  --master-addr "$MBRIDGE_HEAD_NODE" --master-port "$((15000 + SLURM_JOB_ID % 15000))" \\',
        f"  {shlex.join([*torchrun, *_TRAINING])}",
    )


_TRAINING = ("-m", "cloudai_mbridge.training", "--config", POINT_FILES.training_config)


def _python(plan: RunPlan, system: System) -> str:
    if system.python_executable:
        return f"_mbridge_python={shlex.quote(system.python_executable)}"
    if plan.container_image:
        return "_mbridge_python=python3  # the container's"
    return f'_mbridge_python="${{{PYTHON_VARIABLE}:-python3}}"'


def _script(*lines: str) -> str:
    return "\n".join(("#!/bin/bash", *lines)) + "\n"


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


def _submit_slurm(submission: Submission, directory: Path) -> str:
    (run,) = submission.runs
    env = {**without_slurm_variables(os.environ), PYTHON_VARIABLE: sys.executable, **run.secret_env}
    options = {"job_name": name_of(submission)}
    if submission.exclude_nodes:
        options["exclude"] = ",".join(sorted({*run.exclude_nodes, *submission.exclude_nodes}))
    try:
        done = subprocess.run(
            [sys.executable, *_DRIVER, json.dumps(options)],
            cwd=directory,
            env=env,
            capture_output=True,
            text=True,
            errors="replace",  # a job that was submitted is not lost for a byte that is not UTF-8
            timeout=SUBMIT_TIMEOUT_S,
            check=False,
            start_new_session=True,  # Ctrl-C is for mbridge: the driver must not die between submitting and answering
            pass_fds=() if submission.keep_open is None else (submission.keep_open,),
        )
    except subprocess.TimeoutExpired:
        raise ToolFailure(f"NeMo-Run did not submit within {SUBMIT_TIMEOUT_S} s") from None
    except OSError as error:
        raise ToolFailure(f"NeMo-Run's driver cannot be started: {error}") from None
    job_id = parse_submitted(done.stdout)
    if done.returncode == 0 and job_id is not None:
        return job_id
    raise failure(Answer(done.returncode, done.stdout, done.stderr), before="NeMo-Run: ")
