"""Shell scripts of a run. Every value is quoted: whatever a TOML holds reaches a process as data.

A script names its files relatively and starts in the run's directory, so it is the same wherever it is written. The
interpreter is the system file's `python_executable`; without one it comes in the environment as MBRIDGE_PYTHON, so that
a machine without torch renders what a machine with torch submits.
"""

import shlex
from collections.abc import Iterable

from cloudai_mbridge.models.system import SlurmSystem, System
from cloudai_mbridge.plan import POINT_FILES, RunPlan

PYTHON_VARIABLE = "MBRIDGE_PYTHON"
_TRAINING = ["-m", "cloudai_mbridge.training", "--config", POINT_FILES.training_config]


def render_local_script(plan: RunPlan, system: System) -> str:
    """Render the script that trains on this machine."""
    torchrun = ["--standalone", "--nproc-per-node", str(plan.ranks_per_node), *_TRAINING]
    lines = [
        "#!/bin/bash",
        f"# {_comment(plan)}",
        *_preamble(plan, system),
        '"$_mbridge_python" -m torch.distributed.run \\',
        f"  {shlex.join(torchrun)}",
        *_EPILOGUE,
    ]
    return "\n".join(lines) + "\n"


def render_slurm_script(plan: RunPlan, system: SlurmSystem) -> str:
    """Render the batch script that trains on a cluster: one torchrun per node, rendezvous on the first node."""
    torchrun = ["--nnodes", str(plan.num_nodes), "--nproc-per-node", str(plan.ranks_per_node)]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in sbatch_options(plan, system)),
        f"# {_comment(plan)}",
        *_preamble(plan, system),
        '_mbridge_head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "# two jobs may share a node: the port is the job's own, below the ephemeral range",
        "_mbridge_port=$((15000 + SLURM_JOB_ID % 15000))",
        f'srun {shlex.join(srun_options(plan, system))} --cpus-per-task="$SLURM_CPUS_ON_NODE" \\',
        *_container_options(plan),
        '  bash -c \'export PET_NODE_RANK="$SLURM_NODEID"; exec "$@"\' node \\',
        '  "$_mbridge_python" -m torch.distributed.run \\',
        '  --master-addr "$_mbridge_head_node" --master-port "$_mbridge_port" \\',
        f"  {shlex.join([*torchrun, *_TRAINING])}",
        *_EPILOGUE,
    ]
    return "\n".join(lines) + "\n"


def sbatch_options(plan: RunPlan, system: SlurmSystem) -> list[str]:
    """Return the directives, each quoted. sbatch reads quotes in them as a shell does, and expands nothing."""
    options: dict[str, str | int | None] = {
        "job-name": f"mbridge-{plan.key.replace('/', '-')}",
        "partition": system.default_partition,
        "account": system.account,
        "nodes": plan.num_nodes,
        "ntasks-per-node": plan.ranks_per_node,
        "gpus-per-node": plan.ranks_per_node if system.gpus_per_node else None,
        "time": plan.time_limit,
        "nodelist": ",".join(plan.nodes) or None,
        "exclude": ",".join(plan.exclude_nodes) or None,
        "distribution": system.distribution,
        "output": POINT_FILES.stdout,
        "error": POINT_FILES.stderr,
    }
    rendered = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    return [*rendered, "--no-requeue", *(shlex.quote(option) for option in system.extra_sbatch_args)]


def srun_options(plan: RunPlan, system: SlurmSystem) -> list[str]:
    """Return srun's options but for --cpus-per-task, which only the job knows."""
    nodes = str(plan.num_nodes)
    options = ["--kill-on-bad-exit=1", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    if system.mpi:
        options.append(f"--mpi={system.mpi}")
    if plan.container_image:
        options.append(f"--container-image={plan.container_image}")
        if system.container_mount_home:
            options.append("--container-mount-home")
    return [*options, *shlex.split(system.extra_srun_args or "")]


def _container_options(plan: RunPlan) -> Iterable[str]:
    """Show the container the run's directory, which only the job knows, and work there."""
    if plan.container_image:
        mounts = "".join(f",{shlex.quote(mount)}" for mount in plan.container_mounts)
        yield f'  --container-mounts="$PWD:$PWD"{mounts} --container-workdir="$PWD" \\'


def _preamble(plan: RunPlan, system: System) -> Iterable[str]:
    yield "set -u"
    for name in sorted(plan.env):
        yield f"export {name}={shlex.quote(plan.env[name])}"
    if system.python_executable:
        yield f"_mbridge_python={shlex.quote(system.python_executable)}"
    elif plan.container_image:
        yield "_mbridge_python=python3  # the container's"
    else:
        yield f'_mbridge_python="${{{PYTHON_VARIABLE}:-python3}}"'


# The marker settles how the job ended when the scheduler has forgotten it.
_EPILOGUE = ("_mbridge_exit=$?", f'echo "$_mbridge_exit" > {POINT_FILES.exit_code}', 'exit "$_mbridge_exit"')


def _comment(plan: RunPlan) -> str:
    return f"mbridge run {plan.key}"
