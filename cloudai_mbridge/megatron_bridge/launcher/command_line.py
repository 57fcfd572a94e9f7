"""The command line of Megatron-Bridge's `scripts/performance/setup_experiment.py`, flag by flag as CloudAI gives it.

`-hf` and `-wdk` name a variable; CloudAI passes the credential itself. The launcher repeats its command line in its
log, in the batch script that it writes and in the command line of every rank. See `start_launcher.py`.
docs/launcher.md lists all differences from CloudAI's command line.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudai_mbridge.megatron_bridge.launcher.options import find_launcher, known_launchers, problems_of
from cloudai_mbridge.megatron_bridge.launcher.plan import HF_TOKEN, WANDB_API_KEY, LauncherRun, UpstreamPlan
from cloudai_mbridge.megatron_bridge.pins import image_path, install_root, repo_path
from cloudai_mbridge.megatron_bridge.release import Release, find_release
from cloudai_mbridge.models.cmd_args import ARGUMENTS, names_in
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.models.values.shell import launcher_word, shell_word
from cloudai_mbridge.models.values.time_limit import format_time_limit

# The flag of each argument that has one
FLAGS = {name: argument.flag for name, argument in ARGUMENTS.items() if argument.flag}


@dataclass(frozen=True)
class _LauncherCommand:
    """What the rows of the table look at."""

    run: LauncherRun
    plan: UpstreamPlan
    system: SlurmSystem
    exists: Callable[[Path], bool]


Row = Callable[[_LauncherCommand], Iterable[str]]


@dataclass(frozen=True)
class Word:
    """A word of the command line. is_literal: CloudAI quotes it, so that no shell expands it here either."""

    text: str
    is_literal: bool

    def __str__(self) -> str:
        return shlex.quote(self.text) if self.is_literal else launcher_word(self.text)


def launcher_words(plan: LauncherRun, system: SlurmSystem, exists: Callable[[Path], bool] = Path.exists) -> list[Word]:
    """Return the launcher's arguments, in the order of the table; as text, each is quoted for the script.

    exists: whether an image file exists; if it does not, Slurm gets the image's address.
    """
    launch = _LauncherCommand(plan, plan.of_launcher, system, exists)
    return [Word(text, row in _LITERAL) for row in _TABLE for text in row(launch)]


def launcher_argv(plan: LauncherRun, system: SlurmSystem, exists: Callable[[Path], bool] = Path.exists) -> list[str]:
    """Return the launcher's arguments as written, before expansion by a shell."""
    return [word.text for word in launcher_words(plan, system, exists)]


def launcher_path(plan: UpstreamPlan, system: SlurmSystem) -> Path:
    """Return the launcher's path in the installed clone; for an unknown release, its path in the newest release."""
    launcher = find_launcher(release_of(plan, system)) or known_launchers()[-1]
    return clone_path(plan, system) / launcher.path


def release_of(plan: UpstreamPlan, system: SlurmSystem) -> Release | None:
    """Return the release of Megatron-Bridge of a run's launcher."""
    return find_release(plan.megatron_bridge.commit, clone_path(plan, system))


def clone_path(plan: UpstreamPlan, system: SlurmSystem) -> Path:
    """Return the installed clone of Megatron-Bridge."""
    return repo_path(install_root(system), plan.megatron_bridge.url, plan.megatron_bridge.commit)


def _credential(flag: str, variable: str) -> Row:
    """Return a row that names the variable in which the launcher's starter finds a credential."""
    return lambda launch: [flag, variable] if variable in launch.plan.credentials else []


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(_text, value)) if isinstance(value, list) else str(value)


# Arguments whose text differs from the value's
_SHOWN: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(("cuda_graph_scope", "recompute_modules"), lambda value: ",".join(names_in(value))),
    "vp": lambda value: "None" if value == 1 else _text(value),
}
# Arguments whose flag has no value
_SWITCHES = frozenset({
    "dryrun", "use_recipes", "enable_nsys", "packed_sequence", "head_only", "profiling_gpu_metrics",
    "list_config_variants", "offline", "dump_env", "deterministic", "export_nsys_sqlite", "retry_on_testing_failure",
})  # fmt: skip
# Arguments with one word per value
_OF_WORDS = frozenset({"dataset_paths", "c4_train_shards"})


def _option(flag: str, value: Any, show: Callable[[Any], str] = _text) -> list[str]:
    """Return a flag with its value, or nothing. argparse needs flag=value for a value that looks like a flag."""
    text = "" if value is None else show(value)
    if not text:
        return []
    return [f"{flag}={text}"] if re.match(r"-(?![0-9.])", text) else [flag, text]


def _of(flag: str, find: Callable[[_LauncherCommand], Any]) -> Row:
    return lambda launch: _option(flag, find(launch))


def _field(name: str) -> Row:
    def row(launch: _LauncherCommand) -> Iterable[str]:
        value = launch.plan.args.get(name)
        if name in _SWITCHES:
            return [FLAGS[name]] if value is True else []
        if name in _OF_WORDS and isinstance(value, list):
            return [FLAGS[name], *map(_text, value)]
        return _option(FLAGS[name], value, _SHOWN.get(name, _text))

    return row


def _image(launch: _LauncherCommand) -> str | None:
    """Return the container image: a file that exists, else the installed one, else the address as written."""
    image = str(launch.plan.args.get("container_image", "")).strip()
    if image.startswith(("/", ".")) and launch.exists(path := Path(image).expanduser()):
        return str(path.absolute())
    installed = image_path(install_root(launch.system), image)
    return str(installed) if image and launch.exists(installed) else image


def _mounts(launch: _LauncherCommand) -> str:
    below = install_root(launch.system)
    repos = [f"{repo_path(below, repo.url, repo.commit)}:{repo.mount_as}" for repo in launch.plan.mounted]
    return ",".join([*(text for mount in launch.run.container_mounts if (text := mount.strip())), *repos])


def _exports(launch: _LauncherCommand) -> Iterable[str]:
    """Set the job's variables in its own shell; the launcher's own option for them breaks at commas."""
    for name in sorted(launch.run.env):
        yield from ("-cb", f"export {name}={shell_word(launch.run.env[name], in_single_quotes=True)}")


def _slurm_params(launch: _LauncherCommand) -> Iterable[str]:
    """Join the parameters; a single one with a blank needs the separator, or the launcher would split at the blank."""
    params = ";".join(launch.plan.slurm_params)
    return _option("--additional_slurm_params", params + ";" if " " in params and ";" not in params else params)


def _overrides(launch: _LauncherCommand) -> Iterable[str]:
    for key, value in launch.plan.overrides.items():
        yield f"{key}={value}" if value else key


_LITERAL: tuple[Row, ...] = (_exports, _slurm_params, _overrides)
_TABLE: tuple[Row, ...] = (
    _of("-a", lambda launch: launch.system.account),
    _of("-p", lambda launch: launch.system.default_partition),
    *map(_field, ("gpu_type", "log_dir")),
    _of("-t", lambda launch: launch.run.time_limit and format_time_limit(launch.run.time_limit_s)),
    _of("-i", _image),
    *map(_field, ("compute_dtype", "task")),
    _credential("-hf", HF_TOKEN),
    _field("nemo_home"),
    _credential("-wdk", WANDB_API_KEY),
    *map(_field, ("wandb_project_name", "wandb_entity_name", "wandb_experiment_name", "wandb_save_dir", "max_retries")),
    *map(_field, ("dryrun", "num_gpus")),
    _of("-gn", lambda launch: launch.plan.gpus_per_node),
    _of("-cm", _mounts),
    _exports,
    *map(_field, ("domain", "use_recipes", "enable_vboost", "model_family_name", "model_recipe_name", "hidden_size")),
    *map(_field, ("num_layers", "pipeline_model_parallel_layout", "first_k_dense_replace", "enable_nsys")),
    *map(_field, ("use_tokendrop", "use_megatron_fsdp", "nccl_ub", "cuda_graph_impl", "cuda_graph_scope")),
    *map(_field, ("tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length", "moe_a2a_overlap", "max_steps")),
    *map(_field, ("recompute_num_layers", "activation_offload_layers", "recompute_modules")),
    lambda launch: ["--detach", "false"],  # the log is read from a launcher that stays until the job has ended
    *map(_field, ("lr", "min_lr", "warmup_iters", "pretrained_checkpoint", "save_dir", "load_dir", "save_interval")),
    *map(_field, ("most_recent_k", "save_config_filepath", "data", "dataset_paths", "dataset_root")),
    *map(_field, ("index_mapping_dir", "dataset_name", "packed_sequence", "head_only", "tokenizer_type")),
    *map(_field, ("tokenizer_model", "vocab_size", "pytorch_profiler", "profiling_start_step", "profiling_stop_step")),
    *map(
        _field, ("record_memory_history", "profiling_gpu_metrics", "profiling_ranks", "nsys_trace", "nsys_extra_args")
    ),
    _slurm_params,
    *map(_field, ("config_variant", "list_config_variants")),
    # options that CloudAI lacks
    *map(_field, ("offline", "packager", "optimizer_type", "moe_flex_dispatcher_backend", "dump_env", "deterministic")),
    *map(_field, ("lock_gpu_freq", "enable_pct_binding", "export_nsys_sqlite", "distributed_timeout_minutes")),
    *map(_field, ("retry_on_testing_failure", "c4_root", "c4_train_shards", "num_moe_experts", "peak_mem_clk")),
    _field("preempt_time"),
    _overrides,
)


_ARGUMENT = {flag: f"cmd_args.{name}" for name, flag in FLAGS.items()}


def unknown_options(run: LauncherRun, system: SlurmSystem) -> Iterator[str]:
    """Yield a line for every option or value that a run's launcher lacks; an unknown release's are not judged."""
    launcher = find_launcher(release_of(run.of_launcher, system))
    if launcher is not None:
        for flag, problem in problems_of(launcher_argv(run, system), launcher):
            yield f"test {run.test_id!r}: {_ARGUMENT.get(flag, flag)}: {problem}"
