"""Shell scripts of a run. Every value is quoted: the content of a TOML file reaches a process as data.

A script names its files relatively and starts in the run's directory, so it is the same wherever it is written. The
interpreter is the system file's `python_executable`; without one it comes in the environment as MBRIDGE_PYTHON, so that
a machine without torch renders what a machine with torch submits.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace

from cloudai_mbridge.launch.claim import LAUNCHER_ID, LOCAL_ID, SIXTEEN_HEX, claim_lines
from cloudai_mbridge.models.readers import guard, in_enroots_spelling
from cloudai_mbridge.models.shell import shell_word
from cloudai_mbridge.models.system import SlurmSystem, System
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.training.process.hang import SINCE_VARIABLE, TIMEOUT_VARIABLE
from cloudai_mbridge.training.process.log_lines import JOB_TOKEN_VARIABLE

PYTHON_VARIABLE = "MBRIDGE_PYTHON"
REHEARSAL_MINUTES = 30  # of one point
REHEARSAL_LEVELS = ("states", "step")  # what each rank does: it is built; it takes a step as well
TRAINING = ["-m", "cloudai_mbridge.training", "--config", POINT_FILES.training_config]


def render_local_script(plan: RunPlan, system: System) -> str:
    start = (f"# mbridge run {plan.key}", *LOCAL_START, *_preamble(plan, system, "$(date +%s)"))
    return _script(*start, *_one_machine(plan, indent=""), *EPILOGUE)


def render_slurm_script(plan: RunPlan, system: SlurmSystem) -> str:
    """Render the batch script that trains on a cluster: one torchrun per node, rendezvous on the first node."""
    return _script(
        *map(directive, sbatch_options(plan, system)),
        f"# mbridge run {plan.key}",
        *SLURM_START,
        *_preamble(plan, system, "${SLURM_JOB_START_TIME:-$(date +%s)}"),
        *container_guard(plan),
        *_node_commands(plan),
        *(_FIRST_NODE if plan.num_nodes > 1 else ()),
        CPUS_LINE,
        f'srun --cpus-per-task="$_mbridge_cpus" {shlex.join(srun_options(plan, system))} \\',
        *_container_options(plan),
        *(_several_machines(plan) if plan.num_nodes > 1 else _one_machine(plan, indent="  ")),
        *EPILOGUE,
    )


def render_rehearsal_script(plan: RunPlan, gpu: str, python: str, level: str) -> str:
    """Render the script that rehearses a run on this machine, with the run's variables. gpu: the kind of its GPUs."""
    program = _rehearsal_program(plan, gpu, level)
    return _script("set -u", *_rehearsal_exports(plan), f"exec {shlex.quote(python)} {program}")


def render_rehearsal_job(plan: RunPlan, system: SlurmSystem, gpu: str, name: str, level: str) -> str:
    """Render the script that rehearses a run on one core of one node, in the run's image. name: of the job."""
    return _script(
        "set -u",
        *_rehearsal_exports(plan),
        interpreter(plan, system),
        *container_guard(plan),
        f"exec srun {shlex.join(_rehearsal_options(plan, system, name))} \\",
        *_container_options(plan),
        f'  "$_mbridge_python" {_rehearsal_program(plan, gpu, level)}',
    )


def _rehearsal_exports(plan: RunPlan) -> list[str]:
    return exports(replace(plan, hang_timeout_s=None))


def _rehearsal_program(plan: RunPlan, gpu: str, level: str) -> str:
    sizes = ["--world", str(plan.world_size), "--gpu", gpu, "--gpus-per-node", str(plan.ranks_per_node)]
    sizes += ["--level", level]
    return shlex.join(["-m", "cloudai_mbridge.training.dry", "--config", POINT_FILES.training_config, *sizes])


_OF_A_JOB = ("--qos", "--reservation", "--constraint", "--comment", "--wckey")  # of the system's options for sbatch


def _rehearsal_options(plan: RunPlan, system: SlurmSystem, name: str) -> list[str]:
    """Return srun's options for a job of its own, on one core of one node."""
    options = {
        "job-name": name,
        "partition": system.default_partition,
        "account": system.account,
        "time": REHEARSAL_MINUTES,
        "nodelist": plan.nodes[0] if len(plan.nodes) == 1 and plan.num_nodes == 1 else None,
        "exclude": ",".join(plan.exclude_nodes) or None,
    }
    words = [f"--{key}={value}" for key, value in options.items() if value is not None]
    words += [each for each in system.extra_sbatch_args if each.partition("=")[0] in _OF_A_JOB]
    one = srun_options(replace(plan, num_nodes=1), system)
    return [*words, *one, "--cpus-per-task=1"]


def array_script(array: str) -> str:
    return f"{array}/array.sbatch"


def render_array_script(array: str, first: RunPlan, system: SlurmSystem) -> str:
    """Render the script of an array; it starts in the root.

    Slurm opens a task's output through its link, index -> the run's directory, and the script goes there and starts the
    run's script, which is the same as for a single submission.
    """
    output = {"output": f"{array}/%a/{POINT_FILES.stdout}", "error": f"{array}/%a/{POINT_FILES.stderr}"}
    return _script(
        *map(
            directive, sbatch_options(first, system, {"job-name": job_name(system, array_key(array, first)), **output})
        ),
        f"# mbridge {array}: each task runs the script of the run that its link names",
        f'cd -P {shlex.quote(array)}/"$SLURM_ARRAY_TASK_ID" && exec bash {POINT_FILES.slurm_script}',
    )


def _script(*lines: str) -> str:
    return "\n".join(("#!/bin/bash", *lines)) + "\n"


# Nodes may differ; before srun's other options, so that one of the user's wins: "16(x2),8" -> 8
CPUS_LINE = (
    '_mbridge_cpus=$(tr , "\\n" <<< "${SLURM_JOB_CPUS_PER_NODE:-$SLURM_CPUS_ON_NODE}"'
    " | sed 's/(.*//' | sort -n | head -n 1)"
)
_FIRST_NODE = (
    '_mbridge_head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    "# two jobs may share a node: the port is the job's own, below the ephemeral range",
    "_mbridge_port=$((15000 + SLURM_JOB_ID % 15000))",
)


def _node_commands(plan: RunPlan) -> Iterable[str]:
    """Run commands on every node, outside of a container. A failed command ends the job: its speed would differ."""
    nodes = str(plan.num_nodes)
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    for command in plan.node_commands:
        yield f"{shlex.join([*srun, *shlex.split(command)])} || {{"
        yield f"  _mbridge_exit=$?; echo {shlex.quote(f'error: failed on a node: {command}')} >&2"
        yield f'  echo "$_mbridge_exit" > {POINT_FILES.exit_code}; exit "$_mbridge_exit"'
        yield "}"


def _several_machines(plan: RunPlan) -> Iterable[str]:
    torchrun = ["--nnodes", str(plan.num_nodes), "--nproc-per-node", str(plan.ranks_per_node)]
    yield '  bash -c \'export PET_NODE_RANK="$SLURM_NODEID"; exec "$@"\' node \\'
    yield f'  {_profiled(plan)}"$_mbridge_python" -m torch.distributed.run \\'
    yield '  --master-addr "$_mbridge_head_node" --master-port "$_mbridge_port" \\'
    yield f"  {shlex.join([*torchrun, *TRAINING])}"


def _one_machine(plan: RunPlan, indent: str) -> Iterable[str]:
    """Start the ranks without a host name and without a network."""
    yield f'{indent}{_profiled(plan)}"$_mbridge_python" -m cloudai_mbridge.training.one_machine \\'
    yield f"  {shlex.join(['--nproc-per-node', str(plan.ranks_per_node), *TRAINING])}"


def _profiled(plan: RunPlan) -> str:
    """Return the words that precede torchrun: of nsys, which follows all ranks that it starts."""
    return f"{shlex.join(plan.profiler)} " if plan.profiler else ""


def slug(key: str) -> str:
    return key.replace("/", "-")


def job_name(system: SlurmSystem, key: str, run: str = "") -> str:
    """Return the name under which a point is submitted. run: the name of the run's directory."""
    return f"{system.job_name_prefix}mbridge-{f'{run}-' if run else ''}{slug(key)}"


def array_key(array: str, first: RunPlan) -> str:
    """Return the replacement for a key in an array's name: its first test's id, and its number."""
    return f"{first.test_id}-array-{array.rpartition('/')[2]}"


def sbatch_options(plan: RunPlan, system: SlurmSystem, instead: Mapping[str, str] | None = None) -> list[str]:
    """Return sbatch's options, each one word. instead: values that replace a run's own."""
    options: dict[str, str | int | None] = {
        "job-name": job_name(system, plan.key),
        "partition": system.default_partition,
        "account": system.account,
        "nodes": plan.num_nodes,
        "segment": plan.segment,
        "ntasks-per-node": plan.ranks_per_node,
        "gpus-per-node": plan.ranks_per_node if system.asks_for_gpus else None,
        "time": plan.time_limit,
        "signal": None if plan.preempt_time_s is None else f"TERM@{plan.preempt_time_s}",
        "nodelist": ",".join(plan.nodes) or None,
        "exclude": ",".join(plan.exclude_nodes) or None,
        "distribution": system.distribution,
        "output": POINT_FILES.stdout,
        "error": POINT_FILES.stderr,
        "open-mode": "append",
        **(instead or {}),
    }
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [*words, "--no-requeue", *system.extra_sbatch_args]


def directive(option: str) -> str:
    """Return the line of a batch script that sets an option. sbatch reads quotes as a shell does, expands nothing."""
    name, equals, value = option.partition("=")
    is_named = equals and re.fullmatch(r"--[A-Za-z0-9-]+", name)
    start, word = (f"{name}=", value) if is_named else ("", option)
    return f"#SBATCH {start}{shlex.quote(escaped_for_sbatch(word))}"


def escaped_for_sbatch(text: str) -> str:
    """Return a text with every backslash doubled, since sbatch drops backslashes."""
    return text.replace("\\", "\\\\")


def srun_options(plan: RunPlan, system: SlurmSystem) -> list[str]:
    """Return srun's options except --cpus-per-task, which is available only in the job."""
    nodes = str(plan.num_nodes)
    options = ["--kill-on-bad-exit=1", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    if system.mpi:
        options.append(f"--mpi={system.mpi}")
    if plan.container_image:
        options.append(f"--container-image={in_enroots_spelling(plan.container_image)}")
        if system.container_mount_home:
            options.append("--container-mount-home")
    return [*options, *shlex.split(system.extra_srun_args or ""), *shlex.split(plan.extra_srun_args)]


def _container_options(plan: RunPlan) -> Iterable[str]:
    if plan.container_image:
        yield f"  {mount_options(plan.container_mounts)} \\"


def mount_options(mounts: Iterable[str]) -> str:
    """Return the options that mount the run's directory, whose path is available only in the job, and work there."""
    more = "".join(f",{shell_word(mount)}" for mount in mounts)
    return f'--container-mounts="$PWD:$PWD"{more} --container-workdir="$PWD"'


def container_guard(plan: RunPlan) -> list[str]:
    """Return the lines that end a job whose mounts enroot would interpret: its directory may have been moved."""
    ending = f"echo 1 > {POINT_FILES.exit_code}; exit 1"
    return guard(plan.container_mounts, ending, "PWD") if plan.container_image else []


def exports(plan: RunPlan, without: Iterable[str] = ()) -> list[str]:
    """Return the lines that set the variables of a run, except credentials.

    A value that the job already has overrides the recipe's, as upstream. The ranks record their stacks shortly before
    the runner cancels a job that hangs.
    """
    env = dict(plan.env)
    if plan.hang_timeout_s is not None:
        env[TIMEOUT_VARIABLE] = f"{0.9 * plan.hang_timeout_s:g}"
    lines = {name: f"export {name}={shell_word(env[name])}" for name in env}
    for name, value in plan.recipe_env.items():
        lines.setdefault(name, f'[ "${{{name}+set}}" ] || export {name}={shell_word(value)}')
    return [lines[name] for name in sorted(lines) if name not in without]


def _preamble(plan: RunPlan, system: System, begun: str) -> Iterable[str]:
    """Return the lines that set up a script. begun: when its job began, a shell expression.

    The runner counts a hang from there, so the ranks do, too: a container's import may take most of that time.
    """
    since = [] if plan.hang_timeout_s is None else [f'export {SINCE_VARIABLE}="{begun}"']
    return "set -u", *exports(plan), *since, interpreter(plan, system)


def interpreter(plan: RunPlan, system: System) -> str:
    """Return the line that sets the Python that trains."""
    if system.python_executable:
        return f"_mbridge_python={shlex.quote(system.python_executable)}"
    if plan.container_image:
        return "_mbridge_python=python3  # the container's"
    return f'_mbridge_python="${{{PYTHON_VARIABLE}:-python3}}"'


# The markers determine whether a job has started, and how it ended, when the scheduler has forgotten it.
_STARTED = f"rm -f {POINT_FILES.exit_code}; echo"
SLURM_START = (
    '_mbridge_job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"',
    '_mbridge_job="${_mbridge_job:-$SLURM_JOB_ID}"',
    "# one job of an attempt trains, whatever became of the sbatch that submitted it",
    "# of the name, for which a site may have several values: then the value given to sbatch",
    f'[[ "$SLURM_JOB_NAME" == *".${{{JOB_TOKEN_VARIABLE}:-no token}}"* ]] ||',
    f'  if [[ "$SLURM_JOB_NAME" =~ .*\\.({SIXTEEN_HEX}) ]]; then {JOB_TOKEN_VARIABLE}="${{BASH_REMATCH[1]}}"; fi',
    f'export {JOB_TOKEN_VARIABLE}="${{{JOB_TOKEN_VARIABLE}:-}}"',
    *claim_lines(f'"${JOB_TOKEN_VARIABLE}"', "$_mbridge_job"),
    '_mbridge_start="job=$_mbridge_job token=$_mbridge_token name=$SLURM_JOB_NAME restarts=${SLURM_RESTART_COUNT:-0}"',
    "# a controller that was killed may have forgotten that a job has ended, and run it again; an administrator may",
    "# requeue a success",
    f"_mbridge_end=$(cat {POINT_FILES.exit_code} 2> /dev/null)",
    '_mbridge_same="$_mbridge_start "',
    'if [ "$_mbridge_end" = 0 ]; then _mbridge_same="${_mbridge_start%restarts=*}"; fi',
    f'if [ -n "$_mbridge_end" ] && grep -qsF "$_mbridge_same" {POINT_FILES.started}; then exit "$_mbridge_end"; fi',
    f'{_STARTED} "$_mbridge_start nodes=$SLURM_JOB_NODELIST" >> {POINT_FILES.started}',
)
_LOCAL_MARK = '"${MBRIDGE_LOCAL_JOB:-}"'
LOCAL_START = (
    *claim_lines(_LOCAL_MARK, LOCAL_ID),
    f'{_STARTED} "job={LOCAL_ID} nodes=$(uname -n)" >> {POINT_FILES.started}',
)
LAUNCHER_START = claim_lines(_LOCAL_MARK, LAUNCHER_ID)
EPILOGUE = ("_mbridge_exit=$?", f'echo "$_mbridge_exit" > {POINT_FILES.exit_code}', 'exit "$_mbridge_exit"')
