"""The command line of Megatron-Bridge's `scripts/performance/setup_experiment.py`, and the script around it.

The flags are in CloudAI's order. `-hf` and `-wdk` name a variable; CloudAI passes the credential itself. The launcher
repeats its command line in its log, in the batch script that it writes and in the command line of every rank. See
`start_launcher.py`. docs/launcher.md lists all differences from CloudAI's command line.

The script runs on a host with Slurm's commands, until the job has ended. It starts in the run's directory, names that
directory's files relatively, and the installed ones absolutely.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudai_mbridge.files.run_files import POINT_FILES
from cloudai_mbridge.megatron_bridge.launcher_options import find_launcher, known_launchers, problems_of
from cloudai_mbridge.megatron_bridge.launcher_plan import HF_TOKEN, WANDB_API_KEY, UpstreamPlan
from cloudai_mbridge.megatron_bridge.release import (
    Release,
    find_release,
    image_path,
    install_root,
    repo_path,
    venv_path,
)
from cloudai_mbridge.models.cmd_args import ARGUMENTS, names_in
from cloudai_mbridge.models.readers import guard, image_problem, in_enroots_spelling, path_problem, word_problem
from cloudai_mbridge.models.shell import launcher_word, shell_word
from cloudai_mbridge.models.slurm_values import format_time_limit
from cloudai_mbridge.models.system import SlurmSystem

if TYPE_CHECKING:
    from cloudai_mbridge.plan.run_plan import RunPlan

# The flag of each argument that has one
FLAGS = {name: argument.flag for name, argument in ARGUMENTS.items() if argument.flag}
# Arguments whose flag has no value
_SWITCHES = frozenset({
    "dryrun", "use_recipes", "enable_nsys", "packed_sequence", "head_only", "profiling_gpu_metrics",
    "list_config_variants", "offline", "dump_env", "deterministic", "export_nsys_sqlite", "retry_on_testing_failure",
})  # fmt: skip
# Arguments in the order of the command line; between them stand the values that are not arguments
_MODEL_AND_SIZES = (
    "domain", "use_recipes", "enable_vboost", "model_family_name", "model_recipe_name", "hidden_size",
    "num_layers", "pipeline_model_parallel_layout", "first_k_dense_replace", "enable_nsys",
    "use_tokendrop", "use_megatron_fsdp", "nccl_ub", "cuda_graph_impl", "cuda_graph_scope",
    "tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length", "moe_a2a_overlap", "max_steps",
    "recompute_num_layers", "activation_offload_layers", "recompute_modules",
)  # fmt: skip
_TRAINING_AND_PROFILING = (
    "lr", "min_lr", "warmup_iters", "pretrained_checkpoint", "save_dir", "load_dir", "save_interval",
    "most_recent_k", "save_config_filepath", "data", "dataset_paths", "dataset_root",
    "index_mapping_dir", "dataset_name", "packed_sequence", "head_only", "tokenizer_type",
    "tokenizer_model", "vocab_size", "pytorch_profiler", "profiling_start_step", "profiling_stop_step",
    "record_memory_history", "profiling_gpu_metrics", "profiling_ranks", "nsys_trace", "nsys_extra_args",
)  # fmt: skip
_VARIANT_AND_NEWER = (
    "config_variant", "list_config_variants",
    # options that CloudAI lacks
    "offline", "packager", "optimizer_type", "moe_flex_dispatcher_backend", "dump_env", "deterministic",
    "lock_gpu_freq", "enable_pct_binding", "export_nsys_sqlite", "distributed_timeout_minutes",
    "retry_on_testing_failure", "c4_root", "c4_train_shards", "num_moe_experts", "peak_mem_clk", "preempt_time",
)  # fmt: skip


def launcher_words(
    run: "RunPlan", system: SlurmSystem, exists: Callable[[Path], bool] = Path.exists
) -> list[tuple[str, str]]:
    """Return the launcher's arguments, each as written and quoted for the script.

    exists: whether an image file exists; if it does not, Slurm gets the image's address.
    """
    plan, below = run.of_launcher, install_root(system)
    words: list[tuple[str, str]] = []

    def add(*texts: str) -> None:
        words.extend((text, launcher_word(text)) for text in texts)

    def add_literal(*texts: str) -> None:
        """Add words that CloudAI quotes, so that no shell expands them here either."""
        words.extend((text, shlex.quote(text)) for text in texts)

    def add_arguments(*names: str) -> None:
        add(*(word for name in names for word in _argument(name, plan.args.get(name))))

    add(*_option("-a", system.account), *_option("-p", system.default_partition))
    add_arguments("gpu_type", "log_dir")
    add(*_option("-t", run.time_limit and format_time_limit(run.time_limit_s)))
    add(*_option("-i", _image(str(plan.args.get("container_image", "")).strip(), below, exists)))
    add_arguments("compute_dtype", "task")
    # Each credential's option names the variable in which the launcher's starter finds it
    add(*(["-hf", HF_TOKEN] if HF_TOKEN in plan.credentials else []))
    add_arguments("nemo_home")
    add(*(["-wdk", WANDB_API_KEY] if WANDB_API_KEY in plan.credentials else []))
    add_arguments("wandb_project_name", "wandb_entity_name", "wandb_experiment_name", "wandb_save_dir", "max_retries")
    add_arguments("dryrun", "num_gpus")
    add(*_option("-gn", plan.gpus_per_node))
    repos = (f"{repo_path(below, repo.url, repo.commit)}:{repo.mount_as}" for repo in plan.mounted)
    add(*_option("-cm", ",".join([*filter(None, map(str.strip, run.container_mounts)), *repos])))
    # The job's own shell sets its variables: the launcher's option for them breaks at commas
    for name in sorted(run.env):
        add_literal("-cb", f"export {name}={shell_word(run.env[name], in_single_quotes=True)}")
    add_arguments(*_MODEL_AND_SIZES)
    add("--detach", "false")  # the log is read from a launcher that stays until the job has ended
    add_arguments(*_TRAINING_AND_PROFILING)
    # A single parameter with a blank needs the separator, or the launcher would split at the blank
    params = ";".join(plan.slurm_params)
    add_literal(*_option("--additional_slurm_params", params + ";" if " " in params and ";" not in params else params))
    add_arguments(*_VARIANT_AND_NEWER)
    add_literal(*(f"{key}={value}" if value else key for key, value in plan.overrides.items()))
    return words


def launcher_argv(run: "RunPlan", system: SlurmSystem, exists: Callable[[Path], bool] = Path.exists) -> list[str]:
    """Return the launcher's arguments as written, before expansion by a shell."""
    return [text for text, _ in launcher_words(run, system, exists)]


def _argument(name: str, value: Any) -> list[str]:
    flag = FLAGS[name]
    if name in _SWITCHES:
        return [flag] if value is True else []
    if name in ("dataset_paths", "c4_train_shards") and isinstance(value, list):  # one word per value
        return [flag, *map(_text, value)]
    if name in ("cuda_graph_scope", "recompute_modules"):
        value = ",".join(names_in(value))
    return _option(flag, "None" if name == "vp" and value == 1 else value)


def _option(flag: str, value: Any) -> list[str]:
    """Return a flag with its value, or nothing. argparse needs flag=value for a value that looks like a flag."""
    text = "" if value is None else _text(value)
    if not text:
        return []
    return [f"{flag}={text}"] if re.match(r"-(?![0-9.])", text) else [flag, text]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(_text, value)) if isinstance(value, list) else str(value)


def _image(image: str, install_path: Path, exists: Callable[[Path], bool]) -> str:
    """Return the container image: a file that exists, else the installed one, else the address as written."""
    if image.startswith(("/", ".")) and exists(path := Path(image).expanduser()):
        return str(path.absolute())
    installed = image_path(install_path, image)
    return str(installed) if image and exists(installed) else in_enroots_spelling(image)


def clone_path(plan: UpstreamPlan, system: SlurmSystem) -> Path:
    """Return the installed clone of Megatron-Bridge."""
    return repo_path(install_root(system), plan.megatron_bridge.url, plan.megatron_bridge.commit)


def release_of(plan: UpstreamPlan, system: SlurmSystem) -> Release | None:
    """Return the release of Megatron-Bridge of a run's launcher."""
    return find_release(plan.megatron_bridge.commit, clone_path(plan, system))


def launcher_path(plan: UpstreamPlan, system: SlurmSystem) -> Path:
    """Return the launcher's path in the installed clone; for an unknown release, its path in the newest release."""
    launcher = find_launcher(release_of(plan, system)) or known_launchers()[-1]
    return clone_path(plan, system) / launcher.path


def python_path(plan: UpstreamPlan, system: SlurmSystem) -> Path:
    """Return the Python of the installed NeMo-Run environment."""
    return venv_path(install_root(system), plan.nemo_run.url, plan.nemo_run.commit) / "bin" / "python"


def unknown_options(run: "RunPlan", system: SlurmSystem) -> Iterator[str]:
    """Yield a line for every option or value that a run's launcher lacks; an unknown release's are not judged."""
    launcher = find_launcher(release_of(run.of_launcher, system))
    if launcher is not None:
        for flag, problem in problems_of(launcher_argv(run, system), launcher):
            yield f"test {run.test_id!r}: {_ARGUMENTS.get(flag, flag)}: {problem}"


_ARGUMENTS = {flag: f"cmd_args.{name}" for name, flag in FLAGS.items()} | {"-i": "cmd_args.container_image"}
# The launcher mounts these, or directories with such a name: it names its experiment after the others
_MOUNTED = frozenset({
    "-l", "-nh", "-wdj",
    *(FLAGS[name] for name in (
        "pretrained_checkpoint", "save_dir", "model_family_name", "model_recipe_name", "gpu_type", "compute_dtype",
        "task", "config_variant",
    )),
})  # fmt: skip
# Checked with the test's files; quoted for the ranks' shell
_QUOTED = ("-cm", "-cb")
_SLURM_PARAMS = "--additional_slurm_params"
_KEEPS_SLURM_PARAMS = (0, 5)  # the release since which they do not reach the ranks' script


def interpreted_words(run: "RunPlan", system: SlurmSystem) -> Iterator[str]:
    """Yield a line for every word of the launcher's command line that a reader behind it would interpret."""
    flag, release = "", release_of(run.of_launcher, system)
    is_kept = release is None or release.key >= _KEEPS_SLURM_PARAMS
    argv = launcher_argv(run, system)
    for i, text in enumerate(argv):
        if i >= len(argv) - len(run.of_launcher.overrides):
            flag = "extra_cmd_args"
        elif re.match(r"-(?![0-9.])", text):
            flag, _, text = text.partition("=")
        if flag in _MOUNTED:
            problem = path_problem(text, is_pasted=True)
        elif flag == "-i":
            problem = image_problem(text, is_pasted=True) if text else None
        elif flag == _SLURM_PARAMS:
            problem = word_problem(re.sub("[;|&()]" if is_kept else ";", "", text))
        else:
            problem = None if flag in _QUOTED else word_problem(text)
        if problem:
            yield f"test {run.test_id!r}: {_ARGUMENTS.get(flag, flag)}: {text!r}: {problem}; use a value without it"


# Read when a container is created, before the job's own shell sets anything, so sbatch must inherit them.
_CONTAINER_VARIABLES = ("MELLANOX_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_VISIBLE_DEVICES")

_LOG, _JOB_ID, _EXIT = POINT_FILES.launcher_log, POINT_FILES.slurm_job_id, POINT_FILES.exit_code
# As sbatch and NeMo-Run write it. The same expression in the syntax of grep and of Python.
_GREP_JOB_ID = "(submitted batch job|job id)[: ]+[0-9]+"
_PYTHON_JOB_ID = re.compile(rb"(?:submitted batch job|job id)[: ]+([0-9]+)", re.IGNORECASE)


def render_launcher_script(plan: "RunPlan", system: SlurmSystem, claim: Iterable[str]) -> str:
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
        *guard(plan.container_mounts, f"echo 1 > {_EXIT}; exit 1"),
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


def find_job_ids(log: bytes) -> list[str]:
    """Return the ids of the jobs that the launcher reports as submitted, in order."""
    return list(dict.fromkeys(found.decode() for found in _PYTHON_JOB_ID.findall(log)))


def _argument_lines(words: list[tuple[str, str]], num_overrides: int) -> Iterable[str]:
    """Write each flag and its values on a separate line, and the overrides last."""
    groups: list[list[str]] = []
    for i, (text, quoted) in enumerate(words):
        if not groups or re.match(r"-(?![0-9.])", text) or i >= len(words) - num_overrides:
            groups.append([])
        groups[-1].append(quoted)
    for i, group in enumerate(groups):
        yield f"    {' '.join(group)}" + (" \\" if i + 1 < len(groups) else "")
