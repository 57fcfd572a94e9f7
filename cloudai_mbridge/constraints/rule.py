"""Input and answers of a rule."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType, ModuleType
from typing import Any

from cloudai_mbridge.megatron_bridge.release import Release, version_key
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs, names_in
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes import Recipe
from cloudai_mbridge.recipes.apply import recipe_layout, trained_layout, virtual_stages
from cloudai_mbridge.recipes.load import fit_pattern

_SHARDING = ("optimizer", "ddp")
_PATTERN = "model.hybrid_layer_pattern"
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


class UnknownOperandError(Exception):
    """A rule needs an unknown value that the launcher or an override decides; the message names both."""


class ReadArgs:
    """Arguments of a point, each of which a function returns by its name.

    Rules read some on every point: with `__getattr__`, called after a look-up has failed, they take half as long again.
    """

    def __init__(self, read: Callable[[str], Any]) -> None:
        object.__setattr__(self, "_read", read)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "_read")(name)


@dataclass(frozen=True)
class Point:
    """The input of every rule: scalars only. Absent or zero tp, pp and cp count as 1, as in CloudAI.

    release: of Megatron-Bridge, for points of its launcher; None if unknown.
    is_resolved: `args` contain the launcher's values; an unset argument has Megatron-Core's default.
    overridden: arguments and fields of the model that `extra_cmd_args` set for the upstream launcher; rules do not
    read these.
    settings: those of `extra_cmd_args` for the embedded loop, by their keys: rules read these.
    core: the release of Megatron-Core that trains, such as "0.19"; None if unknown.
    variable: returns the value of an environment variable that the system and the test set, or None.
    """

    args: ResolvedCmdArgs
    system: System | None = None
    recipe: Recipe | None = None
    num_nodes: int | None = None
    release: Release | None = None
    is_resolved: bool = False
    overridden: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=lambda: NO_SETTINGS)
    core: str | None = None
    variable: Callable[[str], Any] = lambda name: None

    def has_core(self, since: str) -> bool | None:
        """Return whether the Megatron-Core that trains is of release `since` or newer; None if unknown."""
        return None if self.core is None else version_key(self.core) >= version_key(since)

    @property
    def tp(self) -> int:
        return self.args.tp or 1

    @property
    def expert_tp(self) -> int:
        """Ranks that share an expert: et, else as in Megatron-Bridge 1 with expert parallelism and tp without.

        The embedded loop takes 1 for experts with biases, too.
        """
        is_one = (self.args.ep or 1) > 1 or (self.is_embedded and self.has_biased_experts)
        return self.args.et or (1 if is_one else self.tp)

    @property
    def has_biased_experts(self) -> bool:
        return bool(self.num_moe_experts) and self.is_on("add_bias_linear")

    @property
    def pp(self) -> int:
        return self.args.pp or 1

    @property
    def cp(self) -> int:
        return self.args.cp or 1

    @property
    def vp(self) -> int | None:
        """Virtual stages: the argument, else those of the user's layout, which Megatron-Core takes from it."""
        layout = self.args.pipeline_model_parallel_layout if self.args.vp is None else None
        return virtual_stages(layout, self.pp) if layout else self.args.vp

    @property
    def use_megatron_fsdp(self) -> bool:
        return bool(self.args.use_megatron_fsdp or self.is_set("dist.use_megatron_fsdp"))

    @property
    def num_optimizer_instances(self) -> int:
        """Copies of what the distributed optimizer shards."""
        return self.args.num_distributed_optimizer_instances or 1

    @property
    def has_distributed_optimizer(self) -> bool:
        """Whether the embedded loop shards the optimizer's state: Megatron-FSDP always, else one of two settings."""
        if self.use_megatron_fsdp:
            return True
        if self.args.optimizer_type not in (None, "adam"):
            return False  # Muon shards its own
        name = "use_distributed_optimizer"
        of_optimizer, of_ddp = (self.recipe.default(section, name) if self.recipe else None for section in _SHARDING)
        own = (of_optimizer, of_optimizer if of_ddp is None else of_ddp)
        return any(
            self.settings.get(f"{each}.{name}", value) is True for each, value in zip(_SHARDING, own, strict=True)
        )

    @property
    def recompute_granularity(self) -> str | None:
        """Recomputation in Megatron-Core's words, "full" or "selective"; None without."""
        own = "selective" if self.recompute_modules else "full" if self.args.recompute_num_layers else None
        value = self.settings.get("model.recompute_granularity", own)
        return value if isinstance(value, str) else None

    @property
    def has_overlapped_all_to_all(self) -> bool:
        return bool(self.args.moe_a2a_overlap or self.is_set("model.overlap_moe_expert_parallel_comm"))

    @property
    def graph_impl(self) -> str:
        """CUDA graph implementation, lower case; "" when off."""
        impl = (self.args.cuda_graph_impl or "").strip().lower()
        return "" if impl in ("none", "null") else impl

    @property
    def cuda_graph_scope(self) -> tuple[str, ...]:
        return _lower_names(self.args.cuda_graph_scope)

    @property
    def has_scoped_graphs(self) -> bool:
        """Whether CUDA graphs count as on in CloudAI's sense: an implementation and at least one scope."""
        return bool(self.graph_impl and self.cuda_graph_scope)

    @property
    def has_full_iteration_graph(self) -> bool:
        """Whether one graph captures the whole iteration, in the words of any Megatron-Core."""
        return self.graph_impl == "full_iteration" or (
            self.graph_impl == "local" and self.cuda_graph_scope == ("full_iteration",)
        )

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        return _lower_names(self.args.recompute_modules)

    @property
    def activation_offload_layers(self) -> int:
        return self.args.activation_offload_layers or 0

    @property
    def num_layers(self) -> int | None:
        """Decoder layers, or None if neither the arguments nor a recipe set them."""
        return self.args.num_layers or self.size("num_layers")

    @property
    def seq_length(self) -> int | None:
        return self.args.seq_length or self.size("seq_length")

    @property
    def num_moe_experts(self) -> int | None:
        return self.args.num_moe_experts or self.size("num_moe_experts")

    @property
    def num_attention_heads(self) -> int | None:
        return self.size("num_attention_heads")

    @property
    def num_query_groups(self) -> int | None:
        """Key-value groups: one per head by default."""
        return self.size("num_query_groups") or self.num_attention_heads

    @property
    def hidden_size(self) -> int | None:
        return self.args.hidden_size or self.size("hidden_size")

    @property
    def head_width(self) -> int | None:
        if (width := self.size("kv_channels")) is not None:
            return width
        heads, hidden = self.num_attention_heads, self.hidden_size
        return None if hidden is None or not heads else hidden // heads

    @property
    def has_rotary_heads(self) -> bool:
        """Whether the whole width of the heads is rotated by the position; multi-latent attention has parts for it."""
        kind = self.of_recipe("position_embedding_type")
        if kind is None:
            kind = "rope" if self.recipe and self.layer_pattern is None else "none"
        return kind in ("rope", "yarn") and self.of_recipe("rotary_percent") in (None, 1.0) and not self.is_latent

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-latent."""
        return self.is_on("multi_latent_attention")

    @property
    def ffn_hidden_size(self) -> int | None:
        """Width of a dense feed-forward: by default four times the hidden size."""
        if (width := self.size("ffn_hidden_size")) is not None:
            return width
        return None if self.hidden_size is None else 4 * self.hidden_size

    @property
    def layer_pattern(self) -> str | None:
        """The layers of a hybrid model, with `|` between stages; None for another model."""
        if self.overridden and "hybrid_layer_pattern" in self.overridden:
            raise UnknownOperandError("hybrid_layer_pattern, which extra_cmd_args set,")
        pattern = self.of_recipe("hybrid_layer_pattern")
        if not isinstance(pattern, str):
            return None
        if _PATTERN not in self.settings:  # the recipe's is repeated or cut
            pattern = fit_pattern(pattern, self.num_layers or 0, 0)
        return pattern.partition("/")[0]

    @property
    def has_attention(self) -> bool:
        """Whether some layer has attention: all models but hybrids without."""
        return (pattern := self.layer_pattern) is None or "*" in pattern

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has a dense feed-forward; `moe_layer_freq` n means a MoE layer every n layers."""
        if (pattern := self.layer_pattern) is not None:
            return "-" in pattern
        if not self.num_moe_experts:
            return True
        if (dense := self._first_dense()) is not None:
            return dense > 0
        freq = self._expert_layers()
        return 0 in freq if isinstance(freq, list) else (freq or 1) > 1

    @property
    def has_expert_layers(self) -> bool:
        """Whether some layer has experts."""
        if not self.num_moe_experts:
            return False
        if (pattern := self.layer_pattern) is not None:
            return "E" in pattern
        freq = None if self._first_dense() is not None else self._expert_layers()
        return not isinstance(freq, list) or any(freq)

    def _first_dense(self) -> int | None:
        """Return `first_k_dense_replace`, which `extra_cmd_args` replace."""
        return None if "model.moe_layer_freq" in self.settings else self.args.first_k_dense_replace

    def _expert_layers(self) -> int | list[Any] | None:
        freq = self.of_recipe("moe_layer_freq")
        if not isinstance(freq, int | list | None):
            raise self._unreadable("moe_layer_freq", freq)
        return freq

    @property
    def pipeline_layout(self) -> str | None:
        """The explicit layout: the user's, else the recipe's for pp*vp stages."""
        given = self.args.pipeline_model_parallel_layout
        if self.recipe is None or (given and not self.is_embedded):
            return given
        if self.is_embedded:
            own = self.size("mtp_num_layers")
            predicted = (self.recipe.mtp_num_layers or None) if own is None else own
            return trained_layout(self.recipe, given, self.pp, self.args.vp, self.num_layers, predicted)
        return recipe_layout(self.recipe, self.pp, self.args.vp, with_mtp=True)

    @property
    def is_embedded(self) -> bool:
        return self.args.launcher is Launcher.EMBEDDED

    @property
    def mtp_num_layers(self) -> int | None:
        """Multi-token-prediction layers, or None without a recipe."""
        own = self.size("mtp_num_layers")
        return self.recipe.mtp_num_layers if own is None and self.recipe else own

    def of_recipe(self, field: str) -> Any:
        """Return a field of the model as it is trained: by `extra_cmd_args`, else by the recipe; None if unset.

        UnknownOperandError: the upstream launcher decides it by `extra_cmd_args`.
        """
        if field in self.overridden:
            raise UnknownOperandError(f"{field}, which extra_cmd_args set,")
        if self.settings and (place := f"model.{field}") in self.settings:
            return self.settings[place]
        return self.recipe.default("model", field) if self.recipe else None

    def size(self, field: str) -> int | None:
        """Return a whole number of the model; UnknownOperandError as `of_recipe`, or if it is something else."""
        value = self.of_recipe(field)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self._unreadable(field, value)

    def is_on(self, field: str) -> bool:
        """Return a switch of the model; UnknownOperandError as `of_recipe`, or if it is something else."""
        value = self.of_recipe(field)
        if not isinstance(value, bool | None):
            raise self._unreadable(field, value)
        return bool(value)

    def is_set(self, key: str) -> bool:
        """Return whether `extra_cmd_args` switch on SECTION.FIELD in the embedded loop."""
        return bool(self.settings) and self.settings.get(key) is True

    def _unreadable(self, field: str, value: Any) -> UnknownOperandError:
        return UnknownOperandError(f"a readable {field}, which is {value!r},")

    @property
    def model_parallel_size(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Data-parallel size, rounded down; 0 when the model does not fit on the ranks."""
        size = self.model_parallel_size
        return self.args.num_gpus // size if size > 0 else 0

    def violation(self, rule_id: str, where: str, fact: str, remedy: str, *shown: str, **others: Any) -> "Violation":
        """Return that a rule is broken at the argument `where`. shown: operands, by their names here or in `args`."""
        found = {name: getattr(self if hasattr(type(self), name) else self.args, name) for name in shown}
        operands = {name: ",".join(value) if isinstance(value, tuple) else value for name, value in found.items()}
        return Violation(rule_id, f"cmd_args.{where}", fact, remedy, operands | others)


def _lower_names(value: str | list[str] | None) -> tuple[str, ...]:
    return tuple([name.lower() for name in names_in(value)])


@dataclass(frozen=True)
class Violation:
    """A broken rule: where, the fact with every operand, the remedy.

    origins: sources of operands that the user did not write.
    """

    rule_id: str
    where: str
    fact: str
    remedy: str
    operands: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = ", ".join(
            f"{name}={value}" + (f" ({self.origins[name]})" if name in self.origins else "")
            for name, value in self.operands.items()
        )
        return f"{self.rule_id} {self.where}: {self.fact} ({shown}); {self.remedy}"

    @property
    def cause(self) -> str:
        """The operands that the user did not write, with their sources: "preset X sets tp = 2"; "" without."""
        by_source: dict[str, list[str]] = {}
        for name, source in self.origins.items():
            if type(value := self.operands[name]) is int and value == 1:  # as if it were unset
                continue
            by_source.setdefault(source, []).append(f"{name} = {as_toml(value)}")
        return " and ".join(f"{source} sets {', '.join(values)}" for source, values in by_source.items())


def as_toml(value: Any) -> str:
    """Return a value of an argument as a TOML file writes it, lists without their brackets."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class NotEvaluated:
    """A rule that could not be decided, and the input that it lacks."""

    rule_id: str
    missing: str


@dataclass(frozen=True)
class Lifted:
    """A rule that is broken as CloudAI sees it, or as upstream ships it, and does not reject the point.

    since: the release that lifted it; "" where it holds with the values that the launcher fills in, or where the point
    leaves a preset of the release as it is.
    """

    rule_id: str
    since: str
    reason: str

    def __str__(self) -> str:
        return f"{self.rule_id} {f'lifted in {self.since}' if self.since else 'not enforced'}: {self.reason}"


class RuleSet(StrEnum):
    """Whose verdict rules C01-C18 give on points of Megatron-Bridge's launcher: the pinned release's, or CloudAI's."""

    RELEASE = "release"
    CLOUDAI = "cloudai"


Answer = Violation | NotEvaluated | Lifted | None
Rule = Callable[[Point], Answer]


def rules_in(*modules: ModuleType) -> tuple[Rule, ...]:
    """Return the rules of modules by their ids: the functions whose names begin with one, such as c04_."""
    found = {name: value for module in modules for name, value in vars(module).items()}
    return tuple(found[name] for name in sorted(found) if re.match(r"[cem]\d\d_", name))
