"""Rules of CloudAI that later releases of Megatron-Bridge have lifted, and for which points.

Each row is a fact about a release, with its source. 0.3 is the oldest known release. The embedded loop trains the same
points as these releases, if its Megatron-Core is new enough.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from cloudai_mbridge.constraints.rule import Answer, Lifted, Point, Rule, Violation


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


def _has_no_graphs(point: Point) -> bool:
    return not point.graph_impl


def _no_router_graph_below_recomputed_experts(point: Point) -> bool:
    is_te = point.graph_impl == "transformer_engine"
    return not (is_te and "moe" in point.recompute_modules and "moe_router" in point.cuda_graph_scope)


_ROWS = (
    Lift(
        "C05",
        "0.6",
        "0.19",
        "Megatron FSDP runs with a graph of the full iteration",
        "0.6.0 perf_recipes with use_megatron_fsdp and a full-iteration graph",
        lambda point: point.has_full_iteration_graph,
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
        lambda point: point.has_full_iteration_graph,
    ),
    Lift(
        "C12",
        "0.6",
        "0.18",
        "offloading runs with a graph of the full iteration",
        "Megatron-Core 0.18, TransformerConfig (cpu_offloading)",
        lambda point: point.has_full_iteration_graph,
    ),
    Lift(
        "C13",
        "0.5",
        "0.18",
        "full_iteration is an implementation of its own",
        "Megatron-Core 0.18, TransformerConfig.cuda_graph_impl; 0.5.0 scripts/performance/configs",
        lambda point: point.graph_impl == "full_iteration",
    ),
    Lift(
        "C15",
        "0.3",
        "0.16",
        "graphs are off",
        "Megatron-Core 0.16, TransformerConfig",
        lambda point: not point.graph_impl,
    ),
    Lift(
        "C16",
        "0.3",
        "0.16",
        "graphs are off",
        "Megatron-Core 0.16, TransformerConfig",
        lambda point: not point.graph_impl,
    ),
    Lift(
        "C17",
        "0.3",
        "0.16",
        "a captured module may be recomputed inside its graph; only moe around a captured moe_router may not",
        "Megatron-Core 0.16 to 0.19, TransformerConfig; 0.3.0 DEEPSEEK_V3_PRETRAIN_CONFIG_GB200_BF16_V1",
        _no_router_graph_below_recomputed_experts,
    ),
)

LIFTS: Mapping[str, tuple[Lift, ...]] = {
    rule_id: tuple(rows) for rule_id, rows in groupby(_ROWS, key=attrgetter("rule_id"))
}


def ask_loop(rule: Rule, point: Point) -> Answer:
    """Return a rule's answer on a point with all arguments; the embedded loop has CloudAI's lifts."""
    answer = rule(point)
    if not isinstance(answer, Violation) or not point.is_embedded:
        return answer
    for lift in LIFTS.get(answer.rule_id, ()):
        if point.has_core(lift.core) is not False and lift.applies(point):
            return Lifted(answer.rule_id, "", lift.reason)
    return answer
