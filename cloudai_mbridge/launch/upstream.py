"""The command line of Megatron-Bridge's `scripts/performance/setup_experiment.py`, flag by flag as CloudAI gives it.

Credentials are no flags here, unlike in CloudAI (`-hf`, `-wdk`): the launcher repeats its command line in its log, in
the batch script that it writes and in the command line of every rank. They travel in the environment only.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudai_mbridge.launch.installed import image_path, repo_path
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.plan import RunPlan, UpstreamPlan

_LAUNCHER = Path("scripts/performance/setup_experiment.py")


@dataclass(frozen=True)
class _Launch:
    """What the rows of the table look at."""

    run: RunPlan
    told: UpstreamPlan
    system: SlurmSystem
    exists: Callable[[Path], bool]


Row = Callable[[_Launch], Iterable[str]]


def launcher_argv(plan: RunPlan, system: SlurmSystem, exists: Callable[[Path], bool] = Path.exists) -> list[str]:
    """Return the launcher's arguments, in the order of the table; each is one element, not yet quoted.

    exists: whether an image file is there; the image's address is given to Slurm where none is.
    """
    assert plan.upstream is not None
    launch = _Launch(plan, plan.upstream, system, exists)
    return [element for row in _TABLE for element in row(launch)]


def install_path(system: SlurmSystem) -> Path:
    """Return the absolute directory of what `mbridge install` installs."""
    return Path(system.install_path or "").expanduser().absolute()


def launcher_path(plan: UpstreamPlan, system: SlurmSystem) -> Path:
    """Return the launcher in the installed clone of Megatron-Bridge."""
    return clone_path(plan, system) / _LAUNCHER


def clone_path(plan: UpstreamPlan, system: SlurmSystem) -> Path:
    """Return the installed clone of Megatron-Bridge."""
    return repo_path(install_path(system), plan.megatron_bridge.url, plan.megatron_bridge.commit)


def shell_word(text: str) -> str:
    """Quote for bash without single quotes, since the launcher puts commands between single quotes of its own."""
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./-]+", text):
        return text
    pieces = re.findall(r"""[$`"\\]|'|[^$`"\\']+""", text)
    return "".join(_QUOTED.get(piece, f'"{piece}"') for piece in pieces) or '""'


_QUOTED = {"$": r"\$", "`": r"\`", '"': r"\"", "\\": r"\\", "'": r'"$(printf \\047)"'}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(_text, value)) if isinstance(value, list) else str(value)


def _names(value: Any) -> str:
    """Write "['a', b]", "a, b" and lists of names as a,b."""
    text = _text(value).strip().strip("\"'")
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    return ",".join(name for part in text.split(",") if (name := part.strip().strip("\"'")))


def _stages(value: Any) -> str:
    return "None" if value == 1 else _text(value)


def _option(flag: str, text: str | None) -> list[str]:
    """Return a flag with its value, or nothing. A value that looks like a flag must hang on its own, for argparse."""
    if text is None or text == "":
        return []
    return [f"{flag}={text}"] if re.match(r"-(?![0-9.])", text) else [flag, text]


def _field(flag: str, name: str, show: Callable[[Any], str] = _text) -> Row:
    def row(launch: _Launch) -> Iterable[str]:
        value = launch.told.args.get(name)
        return [] if value is None else _option(flag, show(value))

    return row


def _switch(flag: str, name: str) -> Row:
    return lambda launch: [flag] if launch.told.args.get(name) is True else []


def _of(flag: str, find: Callable[[_Launch], Any]) -> Row:
    def row(launch: _Launch) -> Iterable[str]:
        value = find(launch)
        return [] if value is None else _option(flag, _text(value))

    return row


def _image(launch: _Launch) -> str | None:
    """Return the container image: a file that exists, else the installed one, else the address as written."""
    image = str(launch.told.args.get("container_image", "")).strip()
    if image.startswith(("/", ".")) and launch.exists(path := Path(image).expanduser()):
        return str(path.absolute())
    installed = image_path(install_path(launch.system), image)
    return str(installed) if image and launch.exists(installed) else image


def _mounts(launch: _Launch) -> str:
    below = install_path(launch.system)
    repos = [f"{repo_path(below, repo.url, repo.commit)}:{repo.mount_as}" for repo in launch.told.mounted]
    return ",".join([*(text for mount in launch.run.container_mounts if (text := mount.strip())), *repos])


def _exports(launch: _Launch) -> Iterable[str]:
    """Set the job's variables in its own shell; the launcher's own option for them breaks at commas."""
    for name in sorted(launch.run.env):
        yield from ("-cb", f"export {name}={shell_word(launch.run.env[name])}")


def _dataset_paths(launch: _Launch) -> Iterable[str]:
    paths = launch.told.args.get("dataset_paths")
    return ["--dataset_paths", *paths] if isinstance(paths, list) else _option("--dataset_paths", paths)


def _slurm_params(launch: _Launch) -> Iterable[str]:
    """Join the parameters; a single one with a blank needs the separator, or the launcher would split at the blank."""
    params = ";".join(launch.told.slurm_params)
    return _option("--additional_slurm_params", params + ";" if " " in params and ";" not in params else params)


def _overrides(launch: _Launch) -> Iterable[str]:
    for key, value in launch.told.overrides.items():
        yield f"{key}={value}" if value else key


_TABLE: tuple[Row, ...] = (
    _of("-a", lambda launch: launch.system.account),
    _of("-p", lambda launch: launch.system.default_partition),
    _field("-g", "gpu_type"),
    _field("-l", "log_dir"),
    _of("-t", lambda launch: launch.run.time_limit),
    _of("-i", _image),
    _field("-c", "compute_dtype"),
    _field("--task", "task"),
    _field("-nh", "nemo_home"),
    _field("-wdp", "wandb_project_name"),
    _field("-wde", "wandb_entity_name"),
    _field("-wdj", "wandb_experiment_name"),
    _field("-wds", "wandb_save_dir"),
    _field("--max_retries", "max_retries"),
    _switch("-d", "dryrun"),
    _field("-ng", "num_gpus"),
    _of("-gn", lambda launch: launch.told.gpus_per_node),
    _of("-cm", _mounts),
    _exports,
    _field("--domain", "domain"),
    _switch("--use_recipes", "use_recipes"),
    _field("-vb", "enable_vboost"),
    _field("-m", "model_family_name"),
    _field("-mr", "model_recipe_name"),
    _field("--hidden_size", "hidden_size"),
    _field("--num_layers", "num_layers"),
    _field("--pipeline_model_parallel_layout", "pipeline_model_parallel_layout"),
    _field("--first_k_dense_replace", "first_k_dense_replace"),
    _switch("-en", "enable_nsys"),
    _field("--use_tokendrop", "use_tokendrop"),
    _field("--use_megatron_fsdp", "use_megatron_fsdp"),
    _field("--nccl_ub", "nccl_ub"),
    _field("--cuda_graph_impl", "cuda_graph_impl"),
    _field("--cuda_graph_scope", "cuda_graph_scope", _names),
    _field("-tp", "tp"),
    _field("-pp", "pp"),
    _field("-cp", "cp"),
    _field("-vp", "vp", _stages),
    _field("-ep", "ep"),
    _field("-et", "et"),
    _field("-mb", "mb"),
    _field("-gb", "gb"),
    _field("-sl", "seq_length"),
    _field("--moe_a2a_overlap", "moe_a2a_overlap"),
    _field("-ms", "max_steps"),
    _field("-rl", "recompute_num_layers"),
    _field("-ol", "activation_offload_layers"),
    _field("--recompute_modules", "recompute_modules", _names),
    lambda launch: ["--detach", "false"],  # the log is read from a launcher that stays until the job has ended
    _field("--lr", "lr"),
    _field("--min_lr", "min_lr"),
    _field("--warmup_iters", "warmup_iters"),
    _field("--pretrained_checkpoint", "pretrained_checkpoint"),
    _field("--save_dir", "save_dir"),
    _field("--load_dir", "load_dir"),
    _field("--save_interval", "save_interval"),
    _field("--most_recent_k", "most_recent_k"),
    _field("--save_config_filepath", "save_config_filepath"),
    _field("--data", "data"),
    _dataset_paths,
    _field("--dataset_root", "dataset_root"),
    _field("--index_mapping_dir", "index_mapping_dir"),
    _field("--dataset_name", "dataset_name"),
    _switch("--packed_sequence", "packed_sequence"),
    _switch("--head_only", "head_only"),
    _field("--tokenizer_type", "tokenizer_type"),
    _field("--tokenizer_model", "tokenizer_model"),
    _field("--vocab_size", "vocab_size"),
    _field("-pyp", "pytorch_profiler"),
    _field("--profiling_start_step", "profiling_start_step"),
    _field("--profiling_stop_step", "profiling_stop_step"),
    _field("-mh", "record_memory_history"),
    _switch("--profiling_gpu_metrics", "profiling_gpu_metrics"),
    _field("--profiling_ranks", "profiling_ranks"),
    _field("--nsys_trace", "nsys_trace"),
    _field("--nsys_extra_args", "nsys_extra_args"),
    _slurm_params,
    _field("-cv", "config_variant"),
    _switch("--list_config_variants", "list_config_variants"),
    _overrides,
)
