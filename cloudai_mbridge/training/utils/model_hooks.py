"""What a hook on a freshly built model takes and returns."""

from collections.abc import Callable
from typing import Any, TypeAlias

from megatron.core.transformer.module import MegatronModule

ModelList: TypeAlias = list[MegatronModule]
ModelHook: TypeAlias = Callable[[MegatronModule | ModelList], ModelList]


def _ensure_model_list(model: Any) -> ModelList:
    """Return a list as it is, and anything else as the only element of one."""
    return model if isinstance(model, list) else [model]
