"""Which Megatron-Bridge a test pins, and what its launcher fills in for a point."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudai_mbridge.constraints import RuleSet, Upstream
from cloudai_mbridge.constraints.rule import option_list
from cloudai_mbridge.megatron_bridge.presets import Preset, find_preset, why_no_preset
from cloudai_mbridge.megatron_bridge.release import Release, find_release
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import GitRepo, MegatronBridgeTestDefinition
from cloudai_mbridge.recipes.apply import MAPPED
from cloudai_mbridge.sweep.run_id import slug

MOUNT = "/opt/Megatron-Bridge"
# The arguments that choose a preset
CHOOSING = (
    *("launcher", "model_recipe_name", "model_family_name", "gpu_type", "compute_dtype", "task", "config_variant"),
    *("use_recipes", "num_gpus"),
)

_LISTS = ("cuda_graph_scope", "recompute_modules")
# Values that say nothing
UNSAID: tuple[Any, ...] = (None, "", [])


def as_said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of arguments, as `megatron_bridge.presets` takes it: lists as lists."""
    return {
        name: list(option_list(value)) if name in _LISTS else value
        for name, value in values.items()
        if value not in UNSAID
    }


def preset_key(preset: Preset | None) -> tuple[Any, ...]:
    """Return what tells presets of one release apart."""
    return () if preset is None else (preset.name, preset.num_gpus)


# Keys of the launcher's configuration that hold an argument, beside those that the embedded loop has, too
_PLACES = {
    "dataset.seq_length": "seq_length",
    "dataset.sequence_length": "seq_length",
    "ddp.use_megatron_fsdp": "use_megatron_fsdp",
    "ddp.nccl_ub": "nccl_ub",
    "model.cuda_graph_impl": "cuda_graph_impl",
    "model.cuda_graph_scope": "cuda_graph_scope",
    "model.cuda_graph_modules": "cuda_graph_scope",
    "model.overlap_moe_expert_parallel_comm": "moe_a2a_overlap",
    "comm_overlap.overlap_moe_expert_parallel_comm": "moe_a2a_overlap",
    "model.cpu_offloading_num_layers": "activation_offload_layers",
    **{".".join(place): name for name, place in MAPPED.items()},
}


@dataclass(frozen=True)
class Pinned:
    """What a test pins.

    release: of Megatron-Bridge; None where it is not known.
    rules: whose C rules hold.
    overridden: arguments and fields of the model that its `extra_cmd_args` set behind the launcher's back.
    """

    release: Release | None = None
    rules: RuleSet = RuleSet.RELEASE
    overridden: frozenset[str] = frozenset()

    def upstream(self, args: ResolvedCmdArgs) -> Upstream | None:
        """Return what the launcher of a point with these arguments adds; None: nothing, the embedded loop runs it."""
        if args.launcher is Launcher.EMBEDDED:
            return None
        return Upstream(self.release, find_preset(args, self.release), self.rules, self.overridden)

    def why_no_preset(self, args: ResolvedCmdArgs) -> str:
        """Say why nobody knows what the launcher fills in."""
        return why_no_preset(args, self.release)


def pinned_by(
    definition: MegatronBridgeTestDefinition, system: System | None = None, rules: RuleSet = RuleSet.RELEASE
) -> Pinned:
    """Return what a test pins. An installed clone says its release itself, else the pinned commit does."""
    repo, overridden = megatron_bridge_of(definition), _overridden(definition.extra_cmd_args)
    if repo is None:
        return Pinned(None, rules, overridden)
    install_path = system.install_path if system else None
    clone = clone_path(Path(install_path), repo.url, repo.commit) if install_path else None
    return Pinned(find_release(repo.commit, clone), rules, overridden)


def _overridden(extra: Mapping[str, str]) -> frozenset[str]:
    keys = [key.lstrip("+~") for key in extra]
    return frozenset(_PLACES.get(key, key.removeprefix("model.")) for key in keys)


def megatron_bridge_of(definition: MegatronBridgeTestDefinition) -> GitRepo | None:
    """Return the first repository that is Megatron-Bridge's by its URL or its mount."""
    for repo in definition.git_repos:
        if "Megatron-Bridge" in repo.url or (repo.mount_as or "").rstrip("/") == MOUNT:
            return repo
    return None


def clone_path(install_path: Path, url: str, commit: str) -> Path:
    """Return where `mbridge install` clones a repository at a commit."""
    return install_path / pinned_name(url, commit)


def pinned_name(url: str, commit: str) -> str:
    """Return the name of a repository at a commit: one safe path component, whatever the URL."""
    name = re.split(r"[/:]", url.rstrip("/"))[-1].removesuffix(".git")
    return f"{slug(name)}__{slug(commit)}"
