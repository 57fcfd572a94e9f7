"""Input and answers of a rule."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType
from typing import Any

from cloudai_mbridge.megatron_bridge.release import Release, version_key
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs, names_in
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes import Recipe
from cloudai_mbridge.recipes.apply import recipe_layout


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
    overridden: fields of the recipe's model, and SECTION.FIELD of others, that `extra_cmd_args` set.
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
        """Ranks that share an expert: et, else as in Megatron-Bridge 1 with expert parallelism and tp without."""
        return self.args.et or (1 if (self.args.ep or 1) > 1 else self.tp)

    @property
    def pp(self) -> int:
        return self.args.pp or 1

    @property
    def cp(self) -> int:
        return self.args.cp or 1

    @property
    def use_megatron_fsdp(self) -> bool:
        return bool(self.args.use_megatron_fsdp)

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
        return self.args.num_layers or self._int_of_recipe("num_layers")

    @property
    def seq_length(self) -> int | None:
        return self.args.seq_length or self._int_of_recipe("seq_length")

    @property
    def num_moe_experts(self) -> int | None:
        return self.args.num_moe_experts or self._int_of_recipe("num_moe_experts")

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has a dense feed-forward; `moe_layer_freq` n means a MoE layer every n layers."""
        if self.args.first_k_dense_replace is not None:
            return not self.num_moe_experts or self.args.first_k_dense_replace > 0
        freq = self.of_recipe("moe_layer_freq")
        return not self.num_moe_experts or (0 in freq if isinstance(freq, list) else (freq or 1) > 1)

    @property
    def pipeline_layout(self) -> str | None:
        """The explicit layout: the user's, else the recipe's for pp*vp stages."""
        if self.args.pipeline_model_parallel_layout or self.recipe is None:
            return self.args.pipeline_model_parallel_layout
        return recipe_layout(self.recipe, self.pp, self.args.vp, with_mtp=True)

    @property
    def is_embedded(self) -> bool:
        return self.args.launcher is Launcher.EMBEDDED

    @property
    def mtp_num_layers(self) -> int | None:
        """Multi-token-prediction layers, or None without a recipe."""
        return self.recipe.mtp_num_layers if self.recipe else None

    def _int_of_recipe(self, field: str) -> int | None:
        value = self.of_recipe(field)
        return value if isinstance(value, int) else None

    def of_recipe(self, field: str) -> Any:
        """Return a field of the recipe's model, or None; UnknownOperandError if `extra_cmd_args` set it."""
        if field in self.overridden:
            raise UnknownOperandError(f"{field}, which extra_cmd_args set,")
        return self.recipe.default("model", field) if self.recipe else None

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
