"""Decide the arguments of Megatron-Bridge's own launcher for a point."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.megatron_bridge.release import MOUNT, megatron_bridge_of
from cloudai_mbridge.models.cmd_args import FP8_RECIPES, ResolvedCmdArgs
from cloudai_mbridge.models.loading import LoadedTest
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.shell import absolute, slurm_pattern_in
from cloudai_mbridge.models.slurm_values import expand_hostlist
from cloudai_mbridge.models.system import SlurmSystem, System, slurm_of
from cloudai_mbridge.models.test_definition import NEMO_RUN, GitRepo
from cloudai_mbridge.training.credentials.find import is_secret

HF_TOKEN, WANDB_API_KEY = "HF_TOKEN", "WANDB_API_KEY"  # the variables' names

# Passed even if the user left the default, unless empty. CloudAI leaves out gpu_type, which the launcher requires.
_ALWAYS_PASSED = ("gpu_type", "num_gpus", "model_family_name", "model_recipe_name", "save_config_filepath")
# Relative paths are resolved against the command's current directory; the launcher starts in another directory
_HOST_PATHS = ("log_dir", "nemo_home")
# Arguments without a flag of their own that CloudAI drops; the training takes them as overrides.
_AS_OVERRIDES = {
    "fp8_recipe": "mixed_precision.fp8_recipe",
    "num_distributed_optimizer_instances": "ddp.num_distributed_optimizer_instances",
}
# CloudAI's own overrides, which the user's replace; the memory of upstream runs is read from TensorBoard
_TENSORBOARD = {
    "logger.tensorboard_dir": "/nemo_run/tb_logs",
    "logger.log_timers_to_tensorboard": "true",
    "logger.log_throughput_to_tensorboard": "true",
    "logger.log_memory_to_tensorboard": "true",
}


@dataclass(frozen=True)
class Repo:
    """A repository pinned at a commit. mount_as: where containers see it; "" if they do not."""

    url: str
    commit: str
    mount_as: str = ""


@dataclass(frozen=True)
class UpstreamPlan:
    """Arguments of Megatron-Bridge's own launcher.

    args: the cmd_args that become flags: set by the user or the sweep, or always passed; no credentials, nothing empty.
    credentials: variables of the launcher's environment whose features are switched on.
    overrides: Hydra overrides, key -> value; a value of "" stands for the bare key.
    slurm_params: options of sbatch, each "name=value" or a bare name.
    mounted: repositories that containers see.
    nemo_run: the repository whose environment the launcher runs in.
    """

    args: Mapping[str, Any]
    overrides: Mapping[str, str]
    gpus_per_node: int | None
    slurm_params: tuple[str, ...]
    megatron_bridge: Repo
    mounted: tuple[Repo, ...]
    nemo_run: Repo
    credentials: tuple[str, ...] = ()


def refuse_upstream(test: LoadedTest, system: System) -> Iterator[str]:
    """Yield a line for every setting that the upstream launcher needs and the files lack."""
    where, args = f"test {test.run.id!r}", test.definition.cmd_args
    if system.is_one_machine:
        yield (
            f"{where}: cmd_args.launcher = 'megatron_bridge' submits Slurm jobs; use a Slurm system,"
            " or set launcher = 'embedded' to train on this machine"
        )
        return
    if not system.install_path:
        yield f"system {system.name!r}: install_path is missing; name the directory of `mbridge install`"
    for name in ("model_family_name", "model_recipe_name"):
        if not getattr(args, name):
            yield f"{where}: cmd_args.{name} is missing; the upstream launcher needs it"
    log_dirs = getattr(args, "log_dir")  # noqa: B009 - a field that is made at run time
    for log_dir in log_dirs if isinstance(log_dirs, list) else [log_dirs]:
        if found := slurm_pattern_in(absolute(log_dir).replace(r"\$", "")):
            yield f"{where}: cmd_args.log_dir: Slurm reads {found!r} in it as a pattern of its own; choose another path"
    for name in ("nsys_trace", "nsys_extra_args"):
        if isinstance(getattr(args, name), list) and f"cmd_args.{name}" in test.definition.dse_excluded_args:
            yield f"{where}: cmd_args.{name} cannot be a list; give one string with commas"
    if megatron_bridge_of(test.definition) is None:
        yield (
            f"{where}: git_repos: Megatron-Bridge is missing; pin it with [[git_repos]], url and commit"
            f" (a url that contains 'Megatron-Bridge', or mount_as = {MOUNT!r})"
        )


def plan_upstream(test: LoadedTest, args: ResolvedCmdArgs, system: System) -> UpstreamPlan:
    """Plan a point that passed `refuse_upstream`; BadInput for a Slurm option that cannot be passed."""
    definition = test.definition
    repo = megatron_bridge_of(definition)
    assert repo is not None
    slurm = slurm_of(system)
    gpus_per_node = args.gpus_per_node or slurm.gpus_per_node
    # a run without a token is not submitted
    is_wanted = {HF_TOKEN: not args.offline, WANDB_API_KEY: bool((args.wandb_key or "").strip())}
    values = {key: getattr(args, name) for name, key in _AS_OVERRIDES.items()}
    texts = {key: str(value) for key, value in values.items() if value not in (None, "")}
    texts = {key: FP8_RECIPES.get(text.removeprefix("fp8_"), text) for key, text in texts.items()}
    return UpstreamPlan(
        args=launcher_args(args, test.run),
        credentials=tuple(name for name in is_wanted if is_wanted[name]),
        overrides=_TENSORBOARD | texts | dict(definition.extra_cmd_args),
        gpus_per_node=gpus_per_node,
        slurm_params=_slurm_params(slurm, gpus_per_node, test.run),
        megatron_bridge=_repo(repo),
        mounted=tuple(_repo(repo) for repo in definition.git_repos if repo.mount_as),
        nemo_run=_repo(definition.nemo_run_repo or NEMO_RUN),
    )


def is_passed(name: str, args: ResolvedCmdArgs, run: TestRun) -> bool:
    """Return whether an argument is passed to the launcher.

    CloudAI passes the arguments set by the user or the sweep. For a test that a scenario refers to by name it also
    passes the defaults: it writes the definition out and reads it back, which marks everything as set.
    """
    return name in args.model_fields_set or name in _ALWAYS_PASSED or run.test_name is not None


def launcher_args(args: ResolvedCmdArgs, run: TestRun) -> dict[str, Any]:
    """Return the arguments that become flags; never an empty one."""
    values = {name: value for name, value in args.model_dump(mode="json").items() if is_passed(name, args, run)}
    if "moe_a2a_overlap" in values:
        values["moe_a2a_overlap"] = bool(args.moe_a2a_overlap)  # as CloudAI passes it
    if values.get("cuda_graph_impl") == "full_iteration":  # no launcher's parser accepts it
        values |= {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}
    return {
        name: absolute(value) if name in _HOST_PATHS else value
        for name, value in values.items()
        if value is not None and value not in ("", []) and not is_secret(name)
    }


def graph_note(args: ResolvedCmdArgs) -> str | None:
    """Return a note about a CUDA graph scope without effect, or None."""
    scope = args.cuda_graph_scope
    if args.cuda_graph_impl != "full_iteration" or not scope or "full_iteration" in str(scope).lower():
        return None
    return f"cuda_graph_scope = {scope!r} has no effect: cuda_graph_impl = 'full_iteration' captures everything"


def _repo(repo: GitRepo) -> Repo:
    return Repo(repo.url, repo.commit, repo.mount_as or "")


def _slurm_params(system: SlurmSystem, gpus_per_node: int | None, run: TestRun) -> tuple[str, ...]:
    """Return sbatch options as the launcher reads them; named nodes replace excluded nodes."""
    nodes = sorted(name for text in run.nodes for name in expand_hostlist(text))
    named: Mapping[str, str] = {"nodelist": ",".join(nodes)} if nodes else {"exclude": ",".join(run.exclude_nodes)}
    params = [f"{name}={value}" for name, value in named.items() if value]
    if system.asks_for_gpus:
        params = [f"gpus-per-node={gpus_per_node}", f"gres=gpu:{gpus_per_node}", *params]
    for option in system.extra_sbatch_args:
        if not (found := re.fullmatch(r"--([\w-]+)(?:(?:=|\s+)(.*))?", option.strip())):
            raise _no_long_option(f"system {system.name!r}: extra_sbatch_args", option)
        params.append(found[1] if found[2] is None else f"{found[1]}={found[2]}")
    for where, text in ((f"system {system.name!r}", system.extra_srun_args), (f"test {run.id!r}", run.extra_srun_args)):
        words = shlex.split(text or "")
        while words:
            word = words.pop(0)
            if not word.startswith("--"):
                raise _no_long_option(f"{where}: extra_srun_args", word)
            has_value = "=" not in word and words and not words[0].startswith("--")
            params.append(word[2:] + (f"={words.pop(0)}" if has_value else ""))
    for param in params:
        if ";" in param:
            raise BadInput(f"test {run.id!r}: {param!r} cannot reach the upstream launcher, which splits at ';'")
        if "\\" in param:
            raise BadInput(f"test {run.id!r}: {param!r} cannot reach Slurm: sbatch drops the backslash; remove it")
    return tuple(params)


def _no_long_option(where: str, word: str) -> BadInput:
    return BadInput(f"{where}: {word!r} cannot reach the upstream launcher; write long options, --name=value")
