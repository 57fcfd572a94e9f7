"""What all model providers share: a Megatron-Core config whose derived values are computed by `finalize()`, as often as
it is called; until then every field may be changed. Field names are Megatron-Bridge's."""

import copy
from dataclasses import fields
from typing import Any, Generic, TypeVar

from cloudai_mbridge.training.models.fill_in import fill_in, naming_transformer_engine

M = TypeVar("M")


class CannotBuild(NotImplementedError):
    """The model validates, but this version cannot build it."""


class ModelProvider(Generic[M]):
    """A model's config that builds the model."""

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> M:
        """Build this pipeline stage's part.

        pre_process, post_process: whether it holds the embedding, the output layer; None asks Megatron's groups.

        Raises:
            CannotBuild: this version builds no such model.
        """
        raise CannotBuild(f"{type(self).__name__}: this version validates such models and does not build them")


class Deferred:
    """Post-init that waits for `finalize()`.

    What was given is remembered and put back before post-init runs again: it replaces some fields by derived values.
    """

    _is_finalizing: bool = False

    def run_post_init(self, post_init: Any) -> None:
        """Compute what follows from the fields as the user has set them, also if that was done before."""
        for name, (given, derived) in self.__dict__.pop("_derived", {}).items():
            if _same(getattr(self, name), derived):  # not changed by the user since
                setattr(self, name, given)
        before = {field.name: copy.copy(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]
        self._is_finalizing = True
        try:
            fill_in(self)
            with naming_transformer_engine(self):
                post_init()
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
