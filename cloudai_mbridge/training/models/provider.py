"""Base of all model providers: a Megatron-Core config whose derived values are computed by `finalize()`, as often as
it is called; until then every field may be changed. Field names are Megatron-Bridge's."""

import copy
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

import torch
from megatron.core import parallel_state as mpu

from cloudai_mbridge.training.compat.transformer_engine import have_te
from cloudai_mbridge.training.config.text.summary import warn_rank_0
from cloudai_mbridge.training.errors import nearest
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine
from cloudai_mbridge.training.process.groups import grid_groups
from cloudai_mbridge.training.schema.known_names import ACTIVATIONS, DTYPES, FUNCTIONS, dtype_name

M = TypeVar("M")
# Errors of a missing Transformer Engine: 0.16 compares its version with None, newer releases name it
_ASKS_FOR_IT = re.compile(r"'NoneType' and 'Version'|transformer-engine>=|\bTE (version|>=)")
_HOOKS = "_pre_wrap_hooks"


class ModelProvider(Generic[M]):
    """A model's config that builds the model."""

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary, rounded up so that every tensor-parallel rank holds an equal, aligned share."""
        model: Any = self
        assert model.vocab_size is not None, "model.vocab_size is not set; set it, or take the tokenizer's"
        if not model.should_pad_vocab:
            return int(model.vocab_size)
        multiple = model.make_vocab_size_divisible_by * model.tensor_model_parallel_size
        return int(-(-model.vocab_size // multiple) * multiple)

    @property
    def pre_wrap_hooks(self) -> tuple[Callable[[list[Any]], list[Any]], ...]:
        """The hooks registered with `register_pre_wrap_hook`, in order."""
        return tuple(self.__dict__.get(_HOOKS, ()))

    def register_pre_wrap_hook(self, hook: Callable[[list[Any]], list[Any]], prepend: bool = False) -> None:
        """Have `hook` called with this rank's chunks once they are built, before adapters, half precision and DDP.

        It returns the chunks to train. prepend: before the hooks that are there.
        """
        others = self.pre_wrap_hooks
        self.__dict__[_HOOKS] = [hook, *others] if prepend else [*others, hook]

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> M:
        """Build this pipeline stage's part.

        pre_process, post_process: whether it holds the embedding, the output layer; None: decided by Megatron's groups.
        Raises NotImplementedError: this version cannot build such a model.
        """
        raise NotImplementedError(f"{type(self).__name__}: this version validates such models and does not build them")


# Fields that a language model of Megatron-Core takes as arguments of these names
_ARGUMENTS = (
    *("fp16_lm_cross_entropy", "parallel_output", "share_embeddings_and_output_weights"),
    *("position_embedding_type", "rotary_percent", "rotary_base", "seq_len_interpolation_factor"),
)


def model_arguments(
    model: Any, pre_process: bool | None, post_process: bool | None, vp_stage: int | None
) -> dict[str, Any]:
    """Return the arguments that GPT and hybrid models share; None: decided by Megatron's groups, as in `provide`."""
    stages = {
        "pre_process": (mpu.is_pipeline_first_stage, pre_process),
        "post_process": (mpu.is_pipeline_last_stage, post_process),
    }
    return {
        "config": model,
        "vocab_size": model.padded_vocab_size,
        "max_sequence_length": model.seq_length,
        "pg_collection": model._pg_collection or grid_groups(),
        **{name: getattr(model, name) for name in _ARGUMENTS},
        **{
            name: check(ignore_virtual=False, vp_stage=vp_stage) if given is None else given
            for name, (check, given) in stages.items()
        },
    }


@dataclass
class Deferred:
    """Fields of all language models beside Megatron-Core's, and a post-init that waits for `finalize()`.

    Given values are remembered and put back before post-init runs again: it replaces some fields by derived values.
    """

    fp16_lm_cross_entropy: bool = False
    parallel_output: bool = True
    make_vocab_size_divisible_by: int = 128
    rotary_percent: float = 1.0
    seq_len_interpolation_factor: float | None = None
    deallocate_pipeline_outputs: bool = True
    vocab_size: int | None = None
    should_pad_vocab: bool = False
    _pg_collection: Any = None

    _is_finalizing = False

    def run_post_init(self) -> None:
        """Compute the values derived from the fields as set by the user, even if computed before."""
        for name, (given, derived) in self.__dict__.pop("_derived", {}).items():
            if _same(getattr(self, name), derived):  # not changed by the user since
                setattr(self, name, given)
        before = {field.name: copy.copy(getattr(self, field.name)) for field in fields(self)}
        self._is_finalizing = True
        try:
            _fill_in(self)
            self.__post_init__()  # type: ignore[attr-defined]
        except (TypeError, AssertionError, ValueError, ImportError) as error:
            if have_te() or not _ASKS_FOR_IT.search(str(error)):
                raise
            asked = [f"model.{name} = {value!r}" for name in ("fp8", "fp4") if (value := getattr(self, name, None))]
            fact = ", ".join(asked) or "this model"
            raise ValueError(f"{fact} needs Transformer Engine, and none is installed") from error
        finally:
            self._is_finalizing = False
        after = {name: getattr(self, name) for name in before}
        self._derived = {name: (before[name], after[name]) for name in before if not _same(before[name], after[name])}


def _same(a: Any, b: Any) -> bool:
    """Compare without ever raising; values that cannot be compared are the same if they are one object."""
    if a is b:
        return True
    try:
        return bool(type(a) is type(b) and a == b)
    except Exception:  # arrays and the like
        return False


def _fill_in(model: Any) -> None:
    """Convert names to dtypes and functions, and fill in the values derived from the parallel sizes.

    Raises ValueError: a name that is not a dtype or activation function.
    """
    for field in ("params_dtype", "pipeline_dtype", "autocast_dtype"):
        if isinstance(name := getattr(model, field, None), str):
            full = dtype_name(name)
            if full not in DTYPES:
                raise ValueError(f"model.{field} = {name!r} is not a dtype; {nearest(name, DTYPES)}")
            setattr(model, field, getattr(torch, full.removeprefix("torch.")))
    if isinstance(name := getattr(model, "activation_func", None), str):
        full = ACTIVATIONS.get(name, name)
        if full not in FUNCTIONS:
            raise ValueError(f"model.activation_func = {name!r} is not a known function; {nearest(name, ACTIVATIONS)}")
        module, attribute = FUNCTIONS[full]
        model.activation_func = getattr(importlib.import_module(module), attribute)
    has_biased_experts = model.num_moe_experts is not None and model.add_bias_linear  # which cannot be split
    if model.expert_tensor_parallel_size is None and (model.expert_model_parallel_size > 1 or has_biased_experts):
        model.expert_tensor_parallel_size = 1  # as Megatron-Bridge since 0.6; Megatron-Core itself takes tp
    if model.pipeline_model_parallel_size > 1 and model.pipeline_dtype is None:
        model.pipeline_dtype = model.params_dtype
    if model.sequence_parallel and model.tensor_model_parallel_size <= 1:
        warn_rank_0("model.sequence_parallel = True is switched off: tensor_model_parallel_size is 1")
        model.sequence_parallel = False


FUSES_WEIGHT_GRADIENT = "fuse_wgrad_accumulation"  # attribute of Transformer Engine's layers


def has_apex_extension() -> bool:
    """Return whether Megatron-Core's own linear layers can fuse gradient accumulation."""
    return find_spec("fused_weight_gradient_mlp_cuda") is not None


def can_enable_gradient_accumulation_fusion() -> bool:
    """Return whether any layer of a model can fuse on this machine."""
    return has_transformer_engine() or has_apex_extension()


def build_fused(model: Any, build: Callable[[], Any]) -> Any:
    """Build a model; with `gradient_accumulation_fusion`, products add a weight's gradient to the accumulated one.

    Transformer Engine's layers can do it, and so can Megatron-Core's own linear layers with an extension of Apex. A
    Transformer Engine model has one such linear layer, the output layer, and cannot be built with the field on without
    Apex: it is off during the build then.
    """
    fuses = model.gradient_accumulation_fusion
    model.gradient_accumulation_fusion = fuses and has_apex_extension()
    try:
        built = build()
    finally:
        model.gradient_accumulation_fusion = fuses
    for module in built.modules() if fuses else ():
        if hasattr(module, FUSES_WEIGHT_GRADIENT):
            setattr(module, FUSES_WEIGHT_GRADIENT, True)
    return built
