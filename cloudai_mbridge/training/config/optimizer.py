"""The optimizer, and parameters that depart from its settings."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MCoreOptimizerConfig
from megatron.core.optimizer import ParamGroupOverride, ParamKey

from cloudai_mbridge.training.compat.transformer_engine import have_te
from cloudai_mbridge.training.config.scheduler import SchedulerConfig


@dataclass
class OptimizerConfig(MCoreOptimizerConfig):  # type: ignore[misc]
    """Megatron-Core's optimizer settings, checked when they are complete instead of when they are made."""

    def __post_init__(self) -> None:
        """Leave the checks to `finalize`: fields may change until then."""

    def finalize(self) -> None:
        """Apply Megatron-Core's checks to the fields as they are now.

        AssertionError: a precision-aware optimizer that is not a distributed Adam, or states and main copies of
            another dtype than fp32 without one.
        RuntimeError: a precision-aware optimizer without Transformer Engine's fused Adam.

        Warns:
            UserWarning: the mxfp8 recipe without `reuse_grad_buf_for_mxfp8_param_ag`.
        """
        # Megatron-Core 0.16.1 compares Transformer Engine's version first: a TypeError if it is missing
        if self.use_precision_aware_optimizer:
            asks = "use_precision_aware_optimizer needs"
            assert self.optimizer == "adam", f"{asks} optimizer='adam', not {self.optimizer!r}"
            assert self.use_distributed_optimizer, f"{asks} use_distributed_optimizer=True"
            if not have_te():
                raise RuntimeError(f"{asks} Transformer Engine's FusedAdam: it is not installed")
        super().__post_init__()


@dataclass(frozen=True)
class OptimizerConfigOverrideProviderContext:
    """Input of the parameter overrides; `model` is one chunk or the list of this rank's chunks."""

    scheduler_config: SchedulerConfig
    optimizer_config: MCoreOptimizerConfig
    model: torch.nn.Module | list[torch.nn.Module]


@dataclass
class OptimizerConfigOverrideProvider:
    """Exempt biases and vectors from weight decay, and give embedding and output layers their own learning rate."""

    def build_config_overrides(
        self, context: OptimizerConfigOverrideProviderContext
    ) -> dict[ParamKey, ParamGroupOverride] | None:
        """Build the overrides for `get_megatron_optimizer`; None if nothing departs from the settings.

        Biases and one-dimensional parameters get `wd_mult` 0. With the condition "qwen3_next", or Megatron-Core's
        `apply_wd_to_qk_layernorm`, the weights of query and key layer norms keep their decay.
        """
        config, scheduler = context.optimizer_config, context.scheduler_config
        chunks: list[Any] = context.model if isinstance(context.model, list) else [context.model]
        qk_decays = scheduler.no_weight_decay_cond_type == "qwen3_next" or config.apply_wd_to_qk_layernorm

        def is_exempt(name: str, parameter: torch.nn.Parameter) -> bool:
            is_qk_layernorm = "q_layernorm" in name or "k_layernorm" in name
            return name.endswith(".bias") or (parameter.dim() == 1 and not (qk_decays and is_qk_layernorm))

        overrides: dict[ParamKey, ParamGroupOverride] = {}
        if names := tuple(name for chunk in chunks for name, each in chunk.named_parameters() if is_exempt(name, each)):
            overrides[ParamKey(name=names)] = ParamGroupOverride(wd_mult=0.0)
        if config.decoupled_lr is not None:
            own = ParamGroupOverride(max_lr=config.decoupled_lr)
            if config.decoupled_min_lr is not None:
                own["min_lr"] = config.decoupled_min_lr
            overrides[ParamKey(attr="is_embedding_or_output_parameter")] = own
        model: Any = next((chunk.config for chunk in chunks if hasattr(chunk, "config")), None)
        if getattr(model, "use_mup", False):  # learning rates and epsilons by width
            from megatron.core.optimizer import get_mup_config_overrides  # since Megatron-Core 0.17

            overrides |= get_mup_config_overrides(
                config=config, mup_width_mult=model.mup_width_mult, optimizer_type=config.optimizer
            )
        return overrides or None
