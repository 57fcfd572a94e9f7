"""The Megatron-Bridge that a test pins, and the values that its launcher fills in for a point."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.constraints import RuleSet, Upstream
from cloudai_mbridge.constraints.upstream import CHOOSING as PRESET_CHOOSING
from cloudai_mbridge.megatron_bridge.environment import gpu_label
from cloudai_mbridge.megatron_bridge.preset_rows import FIELDS
from cloudai_mbridge.megatron_bridge.presets import Preset, find_preset, loop_preset
from cloudai_mbridge.megatron_bridge.release import Release, find_release, install_root, megatron_bridge_of, repo_path
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import TestDefinition

# The arguments that choose a recipe, and the arguments that choose a preset
STRUCTURAL = ("launcher", "model_recipe_name")
CHOOSING = (*PRESET_CHOOSING, "use_recipes", "num_gpus")


def preset_key(preset: Preset | None) -> tuple[Any, ...]:
    """Return a key that distinguishes the presets of one release."""
    return () if preset is None else (preset.name, preset.num_gpus)


# Keys of the launcher's configuration, in addition to its presets' fields, that change the meaning of an argument
_MORE_PLACES = {
    "dataset.seq_length": "seq_length",
    "dataset.sequence_length": "seq_length",
    "model.cuda_graph_modules": "cuda_graph_scope",
    "model.overlap_moe_expert_parallel_comm": "moe_a2a_overlap",
    "model.cpu_offloading": "activation_offload_layers",
}
_PLACES = {place: name for name, place in FIELDS.items()} | _MORE_PLACES
_OPTIONS = {place.rpartition(".")[2]: name for place, name in _PLACES.items()} | {"sl": "seq_length"}
# Arguments that decide together
_TOGETHER = (
    {"recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"},
    {"cuda_graph_impl", "cuda_graph_scope"},
)


@dataclass(frozen=True)
class Pinned:
    """What a test pins.

    release: of Megatron-Bridge; None where it is not known.
    rules: whose C rules hold.
    overridden: arguments and fields of the model that its `extra_cmd_args` decide.
    system: where the points would run.
    """

    release: Release | None = None
    rules: RuleSet = RuleSet.RELEASE
    overridden: frozenset[str] = frozenset()
    system: System | None = None

    @property
    def gpu_type(self) -> str | None:
        """The system's GPU, if it names one."""
        return self.system.gpu_type if self.system else None

    def upstream(self, args: ResolvedCmdArgs) -> Upstream | None:
        """Return the launcher's additions to a point with these arguments; None: the embedded loop runs it."""
        if args.launcher is Launcher.EMBEDDED:
            return None
        return Upstream(self.release, self.preset(args), self.rules, self.overridden)

    def preset(self, args: ResolvedCmdArgs) -> Preset | None:
        """Return the preset of a point: its launcher's, or the newest release's for the embedded loop."""
        if args.launcher is Launcher.EMBEDDED:
            return loop_preset(args, gpu_label(args, self.system))
        return find_preset(args, self.release)


def pinned_by(definition: TestDefinition, system: System | None = None, rules: RuleSet = RuleSet.RELEASE) -> Pinned:
    """Return the pins of a test. An installed clone determines its release, else the pinned commit does."""
    release = None
    if (repo := megatron_bridge_of(definition)) is not None:
        clone = repo_path(install_root(system), repo.url, repo.commit) if system and system.install_path else None
        release = find_release(repo.commit, clone)
    return Pinned(release, rules, overridden_by(definition.extra_cmd_args), system)


def overridden_by(extra: Mapping[str, str]) -> frozenset[str]:
    """Return the arguments, and fields of the model, that keys or launcher options of `extra_cmd_args` decide."""
    names = {_argument(key) for key in extra}
    for group in _TOGETHER:
        if names & group:
            names |= group
    return frozenset(names)


def _argument(key: str) -> str:
    if key.startswith("-"):
        option = key.lstrip("-").partition("=")[0]
        return _OPTIONS.get(option, option)
    place = key.lstrip("+~")
    return _PLACES.get(place, place.removeprefix("model."))
