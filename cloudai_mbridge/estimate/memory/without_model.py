"""Settings that change memory and that the estimate does not model, by the direction of the change.

With a saving that is not modelled, a predicted peak is an upper bound; with a cost, a lower one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.estimate.memory.layout import RECOMPUTE_MODULES, ParallelLayout

# section.field of a training config -> values with which it changes nothing, in addition to unset and off
_SAVES: Mapping[str, tuple[Any, ...]] = {
    "model.activation_func_fp8_input_store": (),
    "model.cpu_offloading_weights": (),
    "model.disable_parameter_transpose_cache": (),
    "model.distribute_saved_activations": (),
    "model.ep_overlap_early_attn_memory_release": (),
    "model.fine_grained_activation_offloading": (),
    "model.memory_efficient_layer_norm": (),
    "mixed_precision.fp4_param_gather": (),
    "mixed_precision.fp8_dot_product_attention": (),
    "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag": (),
    "optimizer.main_params_dtype": ("float32",),
    "optimizer.store_param_remainders": (),
}
# Of these the recipe's value is modelled, and a value of `extra_cmd_args` is not
_SAVES_IF_SET = {"optimizer.exp_avg_dtype": ("float32",), "optimizer.exp_avg_sq_dtype": ("float32",)}
_COSTS: Mapping[str, tuple[Any, ...]] = {
    "comm_overlap.defer_embedding_wgrad_compute": (),
    "comm_overlap.delay_wgrad_compute": (),
    "comm_overlap.tp_comm_overlap": (),
    "ddp.fsdp_double_buffer": (),
    "ddp.nccl_ub": (),
    "model.attention_dropout": (),
    "model.cpu_offloading_double_buffering": (),
    "model.hidden_dropout": (),
    "model.moe_paged_stash": (),  # a buffer somewhat larger than the activations of experts, which are modelled
}
_OFF = ("", "none", "null", "false", "0", "0.0", "[]")


@dataclass(frozen=True)
class WithoutModel:
    """Names of the settings: those that save memory, those that cost some, and those of unknown effect."""

    saves: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def bound(self) -> str:
        """The words before a predicted peak: "at most", "at least", "about", or "" if all settings are modelled."""
        if self.saves or self.others:
            return "about" if self.costs or not self.saves else "at most"
        return "at least" if self.costs else ""

    @property
    def may_need_less(self) -> bool:
        """Whether less memory than predicted may be needed, so that nothing can be said to be too large."""
        return bool(self.saves or self.others)

    def __str__(self) -> str:
        """Return why the peak is a bound, in one line."""
        parts = ((self.saves, "saves memory"), (self.costs, "costs memory"), (self.others, "may change memory"))
        return "; ".join(f"{', '.join(names)} {what}, which is not modelled" for names, what in parts if names)


def without_model(
    sections: Mapping[str, Mapping[str, Any]],
    extra: Mapping[str, str],
    layout: ParallelLayout,
    others: tuple[str, ...] = (),
) -> WithoutModel:
    """Return the settings of a point that are not modelled.

    sections: of its training config. extra: its `extra_cmd_args`. others: keys that no estimate reads.
    """
    named = {key.lstrip("+"): key for key in extra}
    is_offloading_known = bool(layout.offload_modules)

    def is_on(path: str, neutral: tuple[Any, ...]) -> bool:
        section, _, name = path.partition(".")
        value = extra[named[path]] if path in named else sections.get(section, {}).get(name)
        if isinstance(value, Mapping):  # a data type, such as { _target_ = "torch.bfloat16" }
            value = value.get("_target_")
        text = str(value or "").strip().lower()
        return text not in _OFF and text.rpartition(".")[2] not in neutral

    saves = [path for path, neutral in _SAVES.items() if is_on(path, neutral)]
    saves += [path for path, neutral in _SAVES_IF_SET.items() if path in named and is_on(path, neutral)]
    if is_offloading_known and "model.fine_grained_activation_offloading" not in named:
        saves = [path for path in saves if path != "model.fine_grained_activation_offloading"]
    saves += [f"recomputing {name}" for name in sorted(layout.recompute.modules - set(RECOMPUTE_MODULES))]
    if layout.adapters is not None and layout.adapters.of_single_layers:
        saves.append(f"peft of single layers ({', '.join(layout.adapters.of_single_layers)})")
    costs = [path for path, neutral in _COSTS.items() if is_on(path, neutral)]
    if not layout.has_sequence_parallel:  # it is switched off then
        costs = [path for path in costs if path != "comm_overlap.tp_comm_overlap"]
    known = {*_SAVES, *_SAVES_IF_SET, *_COSTS}
    return WithoutModel(tuple(saves), tuple(costs), tuple(key for key in others if key.lstrip("+") not in known))
