"""Number formats for computing, communicating and storing: a config, and Megatron-Bridge's recipes by name."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Self, TypeVar

import torch

from cloudai_mbridge.training.compat.quantized import GATHERS_FP4
from cloudai_mbridge.training.compat.transformer_engine import describe_te, te_is_at_least

logger = logging.getLogger(__name__)

_FP4_NEEDS_TE = "2.7.0.dev0"
# One setting under two names: fp8_param in the model config, fp8_param_gather in the DDP config
_GATHER_OF = {"fp8_param": "fp8_param_gather", "fp4_param": "fp4_param_gather"}
_OTHER_NAME = _GATHER_OF | {gather: name for name, gather in _GATHER_OF.items()}
# Left by __new__, taken away by __post_init__
_GIVEN_ALONE = "_given_alone"


@dataclass(kw_only=True)
class MixedPrecisionConfig:
    """Hold the precision settings that `setup` copies onto the model, optimizer and DDP configs.

    `fp8_param` and `fp8_param_gather` always agree: setting one sets the other. Given both at construction and
    different, `fp8_param_gather` wins, as in Megatron-Bridge. The same with `fp4_param` and `fp4_param_gather`.
    """

    fp32: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype | None = None
    pipeline_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    autocast_enabled: bool = False
    grad_reduce_in_fp32: bool = True
    fp8: str | None = None
    """Format of FP8 matrix products: "hybrid" (E4M3 forward, E5M2 backward), "e4m3", or None for none."""
    fp8_recipe: str | None = "tensorwise"
    """Method of choosing FP8 scales: "delayed", "tensorwise", "mxfp8" (Blackwell) or "blockwise" (Hopper)."""
    first_last_layers_bf16: bool = False
    fp8_margin: int = 0
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: str = "most_recent"
    fp8_wgrad: bool = True
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    fp8_param: bool | None = None
    fp8_param_gather: bool = False
    fp4: str | None = None
    """Format of FP4 matrix products: "e2m1", or None for none. Excludes `fp8`."""
    fp4_recipe: str = "nvfp4"
    fp4_param: bool | None = None
    fp4_param_gather: bool = False
    loss_scale: float | None = None
    """Static loss scale; None scales dynamically (FP16 only)."""
    initial_loss_scale: float | None = 2**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    reuse_grad_buf_for_mxfp8_param_ag: bool = False

    def __new__(cls, **given: Any) -> Self:
        """Remember whether `fp8_param` came alone: `__init__` then assigns the other's default, which must not win."""
        self = super().__new__(cls)
        alone = {name for name, gather in _GATHER_OF.items() if given.get(name) is not None and gather not in given}
        if alone:
            object.__setattr__(self, _GIVEN_ALONE, {name: given[name] for name in alone})
        return self

    def __post_init__(self) -> None:
        """Let `fp8_param`, if it alone was given, decide for both names."""
        for name, value in self.__dict__.pop(_GIVEN_ALONE, {}).items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field, and its other name if it has one."""
        object.__setattr__(self, name, value)
        other = _OTHER_NAME.get(name)
        if other in self.__dict__:
            object.__setattr__(self, str(other), value)

    def finalize(self) -> None:
        """Fill in `fp8_param` and `fp4_param`, and check the combination. May be called again after changes.

        Raises ValueError for FP4 together with FP8, without a Transformer Engine that knows it, or with weights in it
        that this Megatron-Core does not gather.
        """
        if self.fp8_param is None:
            self.fp8_param = bool(self.fp8_param_gather)
        if self.fp4_param is None:
            self.fp4_param = bool(self.fp4_param_gather)
        if self.fp4_param and not GATHERS_FP4:
            raise ValueError("fp4_param_gather=True requires Megatron-Core >= 0.17; set it to False")
        if self.fp4 and self.fp8:
            raise ValueError(f'fp4="{self.fp4}" and fp8="{self.fp8}" exclude each other; set one of them to None')
        if self.fp4 and not te_is_at_least(_FP4_NEEDS_TE):
            raise ValueError(f'fp4="{self.fp4}" requires Transformer Engine >= {_FP4_NEEDS_TE}; {describe_te()}')

    def setup(self, model_config: Any, optimizer_config: Any = None, ddp_config: Any = None) -> None:
        """Copy every field, defaults included, onto the fields of the same name of the configs that are given."""
        for config in (model_config, optimizer_config, ddp_config):
            if config is not None:
                update_config_with_precision_overrides(self, config)


_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_FP8_RECIPES = {"delayed": "fp8_ds", "tensorwise": "fp8_cs", "mxfp8": "fp8_mx", "blockwise": "fp8_sc"}


def number_format(model_config: Any) -> str:
    """Return the number format of the layers' matrix products by its name in `cmd_args.compute_dtype`, or ""."""
    if getattr(model_config, "fp4", None):
        return str(getattr(recipe := model_config.fp4_recipe, "value", recipe))
    if getattr(model_config, "fp8", None):
        return _FP8_RECIPES.get(getattr(recipe := model_config.fp8_recipe, "value", recipe), "fp8")
    return _DTYPES.get(model_config.params_dtype, "")


_Config = TypeVar("_Config")


def update_config_with_precision_overrides(mixed_precision_config: MixedPrecisionConfig, config: _Config) -> _Config:
    """Copy the precision fields that `config` has too onto it, and return it. Each change is logged at debug level."""
    for field in fields(mixed_precision_config):
        if not hasattr(config, field.name):
            continue
        old, new = getattr(config, field.name), getattr(mixed_precision_config, field.name)
        if old != new:
            setattr(config, field.name, new)
            logger.debug("%s.%s: %s -> %s", type(config).__name__, field.name, old, new)
    return config


RecipeFunction = Callable[[], MixedPrecisionConfig]

MIXED_PRECISION_RECIPES: dict[str, RecipeFunction] = {}
"""Recipe by name; every name stands here twice, with underscores and with hyphens."""


def register(func: RecipeFunction) -> RecipeFunction:
    """Add a recipe under its function's name, with underscores and with hyphens. For use as a decorator."""
    MIXED_PRECISION_RECIPES[func.__name__] = func
    MIXED_PRECISION_RECIPES[func.__name__.replace("_", "-")] = func
    return func


def get_mixed_precision_config(name: str | MixedPrecisionConfig) -> MixedPrecisionConfig:
    """Return a new config of the recipe `name`; hyphens count as underscores. A config is returned as it is.

    Raises ValueError, listing the recipes, for an unknown name.
    """
    if isinstance(name, MixedPrecisionConfig):
        return name
    known = sorted(key for key in MIXED_PRECISION_RECIPES if "-" not in key)
    key = name.replace("-", "_")
    if key not in known:
        nearest = get_close_matches(key, known, n=1)
        hint = f'; did you mean "{nearest[0]}"?' if nearest else "."
        raise ValueError(f'unknown mixed-precision recipe "{name}"{hint} The recipes are: {", ".join(known)}')
    return MIXED_PRECISION_RECIPES[key]()


def _recipe(name: str, base: RecipeFunction | None = None, **beyond: Any) -> RecipeFunction:
    """Make and register the recipe that sets `beyond` on top of `base`."""

    def build() -> MixedPrecisionConfig:
        config = base() if base else MixedPrecisionConfig()
        for field, value in beyond.items():
            setattr(config, field, value)
        return config

    build.__name__ = build.__qualname__ = name
    settings = ", ".join(f"{field}={value}" for field, value in beyond.items())
    build.__doc__ = f"Return {base.__name__ if base else 'the defaults'} with {settings}."
    return register(build)


def _fp8(recipe: str, gathers_params: bool = True, **more: Any) -> dict[str, Any]:
    return {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param_gather": gathers_params, **more}


# Shared by the FP8 and FP4 recipes. "blockwise" scales 128x128 blocks of weights and 1x128 blocks of activations.
_DELAYED = _fp8("delayed", fp8_margin=0, fp8_amax_history_len=1024, fp8_amax_compute_algo="max")
_MXFP8 = _fp8("mxfp8", fp8="e4m3", reuse_grad_buf_for_mxfp8_param_ag=True)
_CURRENT = _fp8("tensorwise")
_BLOCKWISE = _fp8("blockwise")
_SUBCHANNEL = _fp8("blockwise", gathers_params=False)
_NVFP4: dict[str, Any] = dict(fp4="e2m1", fp4_recipe="nvfp4", fp8=None, fp8_param_gather=False)
_NVFP4 |= {"fp4_param_gather": GATHERS_FP4}


def _bf16_layers(start: int, end: int) -> dict[str, Any]:
    """Return the fields that keep the first `start` and the last `end` layers in 16 bits."""
    return dict(first_last_layers_bf16=True, num_layers_at_start_in_bf16=start, num_layers_at_end_in_bf16=end)


_BF16: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
_FP16: dict[str, Any] = {"fp16": True, "params_dtype": torch.half, "pipeline_dtype": torch.half}

# The recipes: name, base, additional settings
bf16_mixed = _recipe("bf16_mixed", **_BF16, grad_reduce_in_fp32=True)
fp16_mixed = _recipe("fp16_mixed", **_FP16, grad_reduce_in_fp32=False)
bf16_with_fp8_delayed_scaling_mixed = _recipe("bf16_with_fp8_delayed_scaling_mixed", bf16_mixed, **_DELAYED)
fp16_with_fp8_delayed_scaling_mixed = _recipe("fp16_with_fp8_delayed_scaling_mixed", fp16_mixed, **_DELAYED)
bf16_with_mxfp8_mixed = _recipe("bf16_with_mxfp8_mixed", bf16_mixed, **_MXFP8)
fp16_with_mxfp8_mixed = _recipe("fp16_with_mxfp8_mixed", fp16_mixed, **_MXFP8)
bf16_with_fp8_current_scaling_mixed = _recipe(
    "bf16_with_fp8_current_scaling_mixed", bf16_mixed, **_CURRENT, **_bf16_layers(1, 1)
)
fp16_with_fp8_current_scaling_mixed = _recipe(
    "fp16_with_fp8_current_scaling_mixed", fp16_mixed, **_CURRENT, **_bf16_layers(1, 1)
)
nemotron_h_bf16_with_fp8_current_scaling_mixed = _recipe(
    "nemotron_h_bf16_with_fp8_current_scaling_mixed", bf16_mixed, **_CURRENT, **_bf16_layers(2, 2)
)
nanov2_bf16_with_fp8_current_scaling_mixed = _recipe(
    "nanov2_bf16_with_fp8_current_scaling_mixed", bf16_mixed, **_BLOCKWISE, **_bf16_layers(2, 2)
)
bf16_with_fp8_subchannel_scaling_mixed = _recipe("bf16_with_fp8_subchannel_scaling_mixed", bf16_mixed, **_SUBCHANNEL)
fp16_with_fp8_subchannel_scaling_mixed = _recipe("fp16_with_fp8_subchannel_scaling_mixed", fp16_mixed, **_SUBCHANNEL)
bf16_with_nvfp4_mixed = _recipe("bf16_with_nvfp4_mixed", bf16_mixed, **_NVFP4)
nemotron_3_super_bf16_with_nvfp4_mixed = _recipe(
    "nemotron_3_super_bf16_with_nvfp4_mixed", bf16_with_nvfp4_mixed, **_bf16_layers(0, 14)
)
