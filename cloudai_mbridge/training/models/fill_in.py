"""What a model config gets before Megatron-Core checks it, as in Megatron-Bridge's `models.transformer_config`."""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cloudai_mbridge.training.compat.transformer_engine import have_te
from cloudai_mbridge.training.config.text.summary import warn_rank_0
from cloudai_mbridge.training.schema.known_names import ACTIVATIONS, DTYPES, FUNCTIONS, dtype_name
from cloudai_mbridge.training.schema.messages import nearest

# A version of it that is missed: by 0.16 in a comparison with None, by newer releases in words
_ASKS_FOR_IT = re.compile(r"'NoneType' and 'Version'|transformer-engine>=|\bTE (version|>=)")
_DTYPE_FIELDS = ("params_dtype", "pipeline_dtype", "autocast_dtype")


def fill_in(model: Any) -> None:
    """Convert names to what they name, and fill in what follows from the parallel sizes.

    Raises:
        ValueError: a name that stands for no dtype or activation function.
    """
    for field in _DTYPE_FIELDS:
        if isinstance(name := getattr(model, field, None), str):
            setattr(model, field, to_dtype(name, f"model.{field}"))
    if isinstance(name := getattr(model, "activation_func", None), str):
        model.activation_func = _to_activation(name)
    if model.pipeline_model_parallel_size > 1 and model.pipeline_dtype is None:
        model.pipeline_dtype = model.params_dtype
    if model.sequence_parallel and model.tensor_model_parallel_size <= 1:
        warn_rank_0("model.sequence_parallel = True is switched off: tensor_model_parallel_size is 1")
        model.sequence_parallel = False


def to_dtype(name: str, where: str) -> torch.dtype:
    """Return the dtype of a name such as "bf16", "bfloat16" or "torch.bfloat16".

    Raises:
        ValueError: `name` is not the name of a dtype; `where` is the field.
    """
    full = dtype_name(name)
    if full not in DTYPES:
        raise ValueError(f"{where} = {name!r} is not a dtype; {nearest(name, DTYPES)}")
    dtype: torch.dtype = getattr(torch, full.removeprefix("torch."))
    return dtype


def _to_activation(name: str) -> Any:
    full = ACTIVATIONS.get(name, name)
    if full not in FUNCTIONS:
        raise ValueError(f"model.activation_func = {name!r} is not a known function; {nearest(name, ACTIVATIONS)}")
    module, attribute = FUNCTIONS[full]
    return getattr(importlib.import_module(module), attribute)


@contextmanager
def naming_transformer_engine(model: Any) -> Iterator[None]:
    """Name Transformer Engine where Megatron-Core compares its version, and none is installed.

    Raises:
        ValueError: in place of what Megatron-Core says of a version that is not there.
    """
    try:
        yield
    except (TypeError, AssertionError, ValueError, ImportError) as error:
        if have_te() or not _ASKS_FOR_IT.search(str(error)):
            raise
        asked = [f"model.{name} = {value!r}" for name in ("fp8", "fp4") if (value := getattr(model, name, None))]
        fact = ", ".join(asked) or "this model"
        raise ValueError(f"{fact} needs Transformer Engine, and none is installed") from error
