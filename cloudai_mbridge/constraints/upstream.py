"""Points of Megatron-Bridge's launcher, which fills in unset arguments, and rules that its releases have lifted.

All rules check the trained values, whoever sets them. C01-C18 check the written values first, as CloudAI does, and only
these if the others are unknown; except C02 and C08, which accept everything in CloudAI. An unknown argument that
upstream decides makes a rule *not evaluated*.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from cloudai_mbridge.constraints import cloudai, megatron_features, megatron_sizes
from cloudai_mbridge.constraints.rule import (
    Answer,
    Lifted,
    NotEvaluated,
    Point,
    ReadArgs,
    Rule,
    RuleSet,
    UnknownOperandError,
    Violation,
    rules_in,
)
from cloudai_mbridge.megatron_bridge.environment import gpu_label
from cloudai_mbridge.megatron_bridge.presets import (
    UNSET,
    UPSTREAM_DECIDES,
    Preset,
    find_preset,
    loop_preset,
    origin,
    with_preset,
)
from cloudai_mbridge.megatron_bridge.release import Release, version_key
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes.apply import with_model_facts


@dataclass(frozen=True)
class Lift:
    """since: the first release without the rule. core: its Megatron-Core, or an older one that has the feature.

    applies: for which points; given with the launcher's values.
    """

    rule_id: str
    since: str
    core: str
    reason: str
    source: str
    applies: Callable[[Point], bool]


def _graphs_are_off(point: Point) -> bool:
    return not point.graph_impl


def _graph_is_full_iteration(point: Point) -> bool:
    return point.has_full_iteration_graph


# 0.3 is the oldest known release. The embedded loop trains the same points, if its Megatron-Core is new enough.
_ROWS = (
    Lift(
        "C05",
        "0.6",
        "0.19",
        "Megatron FSDP runs with a graph of the full iteration",
        "0.6.0 perf_recipes with use_megatron_fsdp and a full-iteration graph",
        _graph_is_full_iteration,
    ),
    Lift(
        "C11",
        "0.3",
        "0.16",
        "overlapped all-to-all runs with Transformer Engine graphs that capture neither moe nor mlp",
        "Megatron-Core 0.16 to 0.19, TransformerConfig; 0.3.0 QWEN3_30B_A3B_PRETRAIN_CONFIG_H100_BF16_V1",
        lambda point: point.graph_impl == "transformer_engine" and not {"moe", "mlp"} & set(point.cuda_graph_scope),
    ),
    Lift(
        "C11",
        "0.5",
        "0.18",
        "overlapped all-to-all runs with a graph of the full iteration",
        "Megatron-Core 0.18, TransformerConfig; 0.5.0 DEEPSEEK_V3_PRETRAIN_CONFIG_GB300_FP8_MX_V2",
        _graph_is_full_iteration,
    ),
    Lift(
        "C12",
        "0.6",
        "0.18",
        "offloading runs with a graph of the full iteration",
        "Megatron-Core 0.18, TransformerConfig (cpu_offloading)",
        _graph_is_full_iteration,
    ),
    Lift(
        "C13",
        "0.5",
        "0.18",
        "full_iteration is an implementation of its own",
        "Megatron-Core 0.18, TransformerConfig.cuda_graph_impl; 0.5.0 scripts/performance/configs",
        lambda point: point.graph_impl == "full_iteration",
    ),
    Lift("C15", "0.3", "0.16", "graphs are off", "Megatron-Core 0.16, TransformerConfig", _graphs_are_off),
    Lift("C16", "0.3", "0.16", "graphs are off", "Megatron-Core 0.16, TransformerConfig", _graphs_are_off),
    Lift(
        "C17",
        "0.3",
        "0.16",
        "a captured module may be recomputed inside its graph; only moe around a captured moe_router may not",
        "Megatron-Core 0.16 to 0.19, TransformerConfig; 0.3.0 DEEPSEEK_V3_PRETRAIN_CONFIG_GB200_BF16_V1",
        lambda point: (
            "moe" not in point.recompute_modules
            or "moe_router" not in point.cuda_graph_scope
            or point.graph_impl != "transformer_engine"
        ),
    ),
)

LIFTS: Mapping[str, tuple[Lift, ...]] = {
    rule_id: tuple(rows) for rule_id, rows in groupby(_ROWS, key=attrgetter("rule_id"))
}


def ask_loop(rule: Rule, point: Point) -> Answer:
    """Return a rule's answer on a point with all arguments; the embedded loop has CloudAI's lifts."""
    try:
        answer = rule(point)
    except UnknownOperandError as error:
        return NotEvaluated(rule_id(rule), str(error))
    if not isinstance(answer, Violation) or not point.is_embedded:
        return answer
    for lift in LIFTS.get(answer.rule_id, ()):
        if point.has_core(lift.core) is not False and lift.applies(point):
            return Lifted(answer.rule_id, "", lift.reason)
    return answer


_CLOUDAI = rules_in(cloudai)
_ON_TRAINED_ONLY = {cloudai.c02_layers_fill_the_pipeline, cloudai.c08_stages_divide_into_virtual_ones}
# Of two contradicting user settings, the launcher keeps one.
ON_WRITTEN_ALONE = {megatron_sizes.m02_sizes_are_positive, megatron_features.m15_full_or_selective_recomputation}
_ON_WRITTEN = ({*_CLOUDAI} - _ON_TRAINED_ONLY) | ON_WRITTEN_ALONE
_TAKE_UNSET_AS_1 = ("C01", "C03", "C04", "C06", "C07", "C09", "C10", "C18")
_DECIDED = frozenset(UPSTREAM_DECIDES)
# The arguments that choose a preset, except the number of GPUs
CHOOSING = ("launcher", "model_recipe_name", "model_family_name", "gpu_type", "compute_dtype", "task", "config_variant")


@dataclass(frozen=True)
class Upstream:
    """Knowledge about the Megatron-Bridge that a test pins, and about its launcher at a point of the test.

    Rules take the record of a point, from `at`, not that of a whole test.

    release: None if unknown.
    preset: values that the launcher fills in at a point; None if unknown, and for a whole test.
    rules: whose C rules hold.
    overridden: arguments and fields of the model that `extra_cmd_args` set: rules do not read these.
    settings: those of `extra_cmd_args` for points of the embedded loop, whose rules read them.
    system: where the points would run.
    """

    release: Release | None = None
    preset: Preset | None = None
    rules: RuleSet = RuleSet.RELEASE
    overridden: frozenset[str] = frozenset()
    system: System | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def preset_of(self, args: ResolvedCmdArgs) -> Preset | None:
        """Return the preset of a point: its launcher's, or the newest release's for the embedded loop."""
        if args.launcher is Launcher.EMBEDDED:
            return loop_preset(args, gpu_label(args, self.system))
        return find_preset(args, self.release)

    def at(self, args: ResolvedCmdArgs) -> "Upstream | None":
        """Return the record of a point with these arguments; None: the embedded loop runs it."""
        return None if args.launcher is Launcher.EMBEDDED else replace(self, preset=self.preset_of(args))

    def trained(self, written: Point, args: Any) -> Point:
        """Return the point with the arguments that will be trained."""
        core = self.release.core if self.release else None
        is_resolved, overridden = self.preset is not None, self.overridden
        return replace(
            written, args=args, release=self.release, is_resolved=is_resolved, overridden=overridden, core=core
        )

    def overrides(self, name: str, written: Any) -> bool:
        """Whether `extra_cmd_args` decide an argument; `cmd_args` win over the launcher's values."""
        return name in self.overridden and (name not in _DECIDED or written in UNSET)

    def why_unknown(self, name: str) -> str:
        """Return a text about an unknown argument and its origin."""
        return f"{name}, which {'extra_cmd_args set' if name in self.overridden else 'Megatron-Bridge decides'},"


_AS_CLOUDAI: Mapping[Rule, Rule] = {
    **dict.fromkeys(_ON_TRAINED_ONLY, lambda point: None),  # placeholders there
    cloudai.c18_deepseek_v3_is_split_as_its_recipe_can: cloudai.split_as_cloudai_decides,
}


def trained_args(written: ResolvedCmdArgs, upstream: Upstream) -> ReadArgs:
    """Return the arguments that will be trained; asking for an unknown one raises UnknownOperandError."""
    resolved = with_preset(written, upstream.preset)

    def read(name: str) -> Any:
        if name in resolved.unknown or upstream.overrides(name, getattr(written, name)):
            raise UnknownOperandError(upstream.why_unknown(name))
        return getattr(resolved.args, name)

    return ReadArgs(read)


def ask(rule: Rule, written: Point, trained: Point, upstream: Upstream) -> Answer:
    """Return a rule's answer on a point. trained: the same with the arguments that will be trained."""
    if upstream.rules is RuleSet.CLOUDAI and rule in _CLOUDAI:
        return _AS_CLOUDAI.get(rule, rule)(written)
    if rule not in _ON_WRITTEN:
        return _of_trained(rule, written, trained, upstream)
    answer = rule(written)
    if rule in ON_WRITTEN_ALONE:
        return answer
    if isinstance(answer, Violation):
        return _lifted(rule, answer, written, trained, upstream)
    if upstream.preset is None or _lift(rule_id(rule), trained, upstream):
        return answer  # CloudAI accepts the written values; a note would refer to a lifted rule
    of_trained = _of_trained(rule, written, trained, upstream)
    return answer if isinstance(of_trained, NotEvaluated) else of_trained


def _of_trained(rule: Rule, written: Point, trained: Point, upstream: Upstream) -> Answer:
    try:
        answer = rule(trained)
    except UnknownOperandError as error:
        return NotEvaluated(rule_id(rule), str(error))
    if not isinstance(answer, Violation) or upstream.preset is None:
        return answer
    if _is_shipped(rule, answer, written, upstream.preset):
        return Lifted(answer.rule_id, "", f"{origin(upstream.preset)} is shipped so, although {answer.fact}")
    unset = [name for name in answer.operands if name in _DECIDED and getattr(written.args, name) in UNSET]
    return replace(answer, origins=dict.fromkeys(unset, origin(upstream.preset)))


def _is_shipped(rule: Rule, broken: Violation, written: Point, preset: Preset) -> bool:
    """Whether the preset alone breaks the rule in the same way: then it is upstream's decision."""
    chosen = {name: getattr(written.args, name) for name in CHOOSING}
    args = ResolvedCmdArgs.model_validate({**chosen, "num_gpus": preset.num_gpus})
    if written.recipe is not None:
        args = with_model_facts(args, written.recipe)
    alone = Point(with_preset(args, preset).args, written.system, written.recipe, None, preset.release, True)
    answer = rule(alone)
    return isinstance(answer, Violation) and answer.fact == broken.fact


def _lifted(rule: Rule, broken: Violation, written: Point, trained: Point, upstream: Upstream) -> Answer:
    """Return why a rule of CloudAI's does not hold here, or that it is broken."""
    if lift := _lift(broken.rule_id, trained, upstream):
        return Lifted(broken.rule_id, lift.since, lift.reason)
    if broken.rule_id in _TAKE_UNSET_AS_1:
        operands = {*broken.operands, *(("tp", "pp", "cp") if "dp" in broken.operands else ())}
        try:
            for name in sorted(operands & _DECIDED):
                getattr(trained.args, name)
        except UnknownOperandError as error:
            return NotEvaluated(broken.rule_id, str(error))
    if upstream.preset is None:
        return broken
    answer = _of_trained(rule, written, trained, upstream)
    if answer is None:
        return Lifted(broken.rule_id, "", f"holds with what {origin(upstream.preset)} fills in")
    return broken if isinstance(answer, NotEvaluated) else answer


def _lift(broken: str, trained: Point, upstream: Upstream) -> Lift | None:
    """Return why the release does not have a rule of CloudAI's for a point; None: it has it."""
    for lift in LIFTS.get(broken, ()):
        with suppress(UnknownOperandError):
            if upstream.release and upstream.release.key >= version_key(lift.since) and lift.applies(trained):
                return lift
    return None


def rule_id(rule: Rule) -> str:
    """Return a rule's id, such as C04."""
    return rule.__name__.partition("_")[0].upper()
