"""The command line of Megatron-Bridge's `scripts/performance/setup_experiment.py`, flag by flag as CloudAI gives it.

`-hf` and `-wdk` name a variable where CloudAI gives the credential itself: the launcher repeats its command line in its
log, in the batch script that it writes and in the command line of every rank. See `start_launcher.py`.
docs/launcher.md lists all differences from CloudAI's command line.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.megatron_bridge.launcher.options import find_launcher, known_launchers, problems_of
from cloudai_mbridge.megatron_bridge.launcher.plan import HF_TOKEN, WANDB_API_KEY, LauncherRun, UpstreamPlan
from cloudai_mbridge.megatron_bridge.pins import image_path, install_root, repo_path
from cloudai_mbridge.megatron_bridge.release import Release, find_release
from cloudai_mbridge.models.cmd_args import ARGUMENTS, names_in
from cloudai_mbridge.models.system import SlurmSystem, System
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

    exists: whether an image file is there; the image's address is given to Slurm where none is.
    """
    assert plan.upstream is not None
    launch = _LauncherCommand(plan, plan.upstream, system, exists)
    return [Word(text, row in _LITERAL) for row in _TABLE for text in row(launch)]


def launcher_argv(plan: LauncherRun, system: SlurmSystem, exists: Callable[[Path], bool] = Path.exists) -> list[str]:
    """Return the launcher's arguments as they are written; a shell has expanded nothing yet."""
    return [word.text for word in launcher_words(plan, system, exists)]


def launcher_path(plan: UpstreamPlan, system: SlurmSystem) -> Path:
    """Return the launcher in the installed clone of Megatron-Bridge; of an unknown release, where the newest has it."""
    launcher = find_launcher(release_of(plan, system)) or known_launchers()[-1]
    return clone_path(plan, system) / launcher.path


def release_of(plan: UpstreamPlan, system: SlurmSystem) -> Release | None:
    """Return the release of Megatron-Bridge that a run's launcher is of."""
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


def _names(value: Any) -> str:
    return ",".join(names_in(value))


def _stages(value: Any) -> str:
    return "None" if value == 1 else _text(value)


def _option(flag: str, text: str | None) -> list[str]:
    """Return a flag with its value, or nothing. A value that looks like a flag must hang on its own, for argparse."""
    if text is None or text == "":
        return []
    return [f"{flag}={text}"] if re.match(r"-(?![0-9.])", text) else [flag, text]


def _field(name: str, show: Callable[[Any], str] = _text) -> Row:
    def row(launch: _LauncherCommand) -> Iterable[str]:
        value = launch.plan.args.get(name)
        return [] if value is None else _option(FLAGS[name], show(value))

    return row


def _switch(name: str) -> Row:
    return lambda launch: [FLAGS[name]] if launch.plan.args.get(name) is True else []


def _values(name: str) -> Row:
    """Return a row whose values are an element each."""

    def row(launch: _LauncherCommand) -> Iterable[str]:
        value = launch.plan.args.get(name)
        return [FLAGS[name], *map(_text, value)] if isinstance(value, list) else _option(FLAGS[name], _maybe(value))

    return row


def _maybe(value: Any) -> str | None:
    return None if value is None else _text(value)


def _of(flag: str, find: Callable[[_LauncherCommand], Any]) -> Row:
    def row(launch: _LauncherCommand) -> Iterable[str]:
        value = find(launch)
        return [] if value is None else _option(flag, _text(value))

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
    _field("gpu_type"),
    _field("log_dir"),
    _of("-t", lambda launch: launch.run.time_limit and format_time_limit(launch.run.time_limit_s)),
    _of("-i", _image),
    _field("compute_dtype"),
    _field("task"),
    _credential("-hf", HF_TOKEN),
    _field("nemo_home"),
    _credential("-wdk", WANDB_API_KEY),
    *map(_field, ("wandb_project_name", "wandb_entity_name", "wandb_experiment_name", "wandb_save_dir")),
    _field("max_retries"),
    _switch("dryrun"),
    _field("num_gpus"),
    _of("-gn", lambda launch: launch.plan.gpus_per_node),
    _of("-cm", _mounts),
    _exports,
    _field("domain"),
    _switch("use_recipes"),
    *map(_field, ("enable_vboost", "model_family_name", "model_recipe_name", "hidden_size", "num_layers")),
    _field("pipeline_model_parallel_layout"),
    _field("first_k_dense_replace"),
    _switch("enable_nsys"),
    *map(_field, ("use_tokendrop", "use_megatron_fsdp", "nccl_ub", "cuda_graph_impl")),
    _field("cuda_graph_scope", _names),
    *map(_field, ("tp", "pp", "cp")),
    _field("vp", _stages),
    *map(_field, ("ep", "et", "mb", "gb", "seq_length", "moe_a2a_overlap", "max_steps", "recompute_num_layers")),
    _field("activation_offload_layers"),
    _field("recompute_modules", _names),
    lambda launch: ["--detach", "false"],  # the log is read from a launcher that stays until the job has ended
    *map(_field, ("lr", "min_lr", "warmup_iters", "pretrained_checkpoint", "save_dir", "load_dir", "save_interval")),
    *map(_field, ("most_recent_k", "save_config_filepath", "data")),
    _values("dataset_paths"),
    *map(_field, ("dataset_root", "index_mapping_dir", "dataset_name")),
    _switch("packed_sequence"),
    _switch("head_only"),
    *map(_field, ("tokenizer_type", "tokenizer_model", "vocab_size", "pytorch_profiler", "profiling_start_step")),
    _field("profiling_stop_step"),
    _field("record_memory_history"),
    _switch("profiling_gpu_metrics"),
    *map(_field, ("profiling_ranks", "nsys_trace", "nsys_extra_args")),
    _slurm_params,
    _field("config_variant"),
    _switch("list_config_variants"),
    # what CloudAI does not know
    _switch("offline"),
    *map(_field, ("packager", "optimizer_type", "moe_flex_dispatcher_backend")),
    _switch("dump_env"),
    _switch("deterministic"),
    _field("lock_gpu_freq"),
    _field("enable_pct_binding"),
    _switch("export_nsys_sqlite"),
    _field("distributed_timeout_minutes"),
    _switch("retry_on_testing_failure"),
    _field("c4_root"),
    _values("c4_train_shards"),
    *map(_field, ("num_moe_experts", "peak_mem_clk", "preempt_time")),
    _overrides,
)


_ARGUMENT = {flag: f"cmd_args.{name}" for name, flag in FLAGS.items()}


def refuse_unknown_options(runs: Iterable[LauncherRun], system: System) -> None:
    """Raise BadInput with one line for every option or value that a launcher lacks; unknown releases are not judged."""
    lines = [line for run in runs for line in unknown_options(run, system)]
    if lines:
        raise BadInput("\n".join(dict.fromkeys(lines)))


def unknown_options(run: LauncherRun, system: System) -> Iterator[str]:
    """Yield a line for every option or value that a run's launcher lacks."""
    if run.upstream is None:
        return
    assert system.scheduler == "slurm"
    launcher = find_launcher(release_of(run.upstream, system))
    if launcher is not None:
        for flag, problem in problems_of(launcher_argv(run, system), launcher):
            yield f"test {run.test_id!r}: {_ARGUMENT.get(flag, flag)}: {problem}"
