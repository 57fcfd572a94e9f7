"""How Megatron-Core finds a parameter group in a checkpoint: from 0.19 on also by its learning rates, so that another
rate stops with a KeyError. While a state is loaded, groups are found by their kind, as in older releases."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer import distrib_optimizer, optimizer

_MODULES = (optimizer, distrib_optimizer)
_KEYS = "param_group_identifier_keys"
# Keys that distinguish groups in every release
KIND = ("wd_mult", "lr_mult", "is_decoupled_lr", "is_expert_parallel")


def kind_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return a group's kind, in the order of `KIND`; NeMo's names of the multipliers are accepted, too."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in KIND)


@contextmanager
def found_by_kind(*groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Let optimizers find their groups by kind; by all of Megatron's keys if two groups of an optimizer share a kind.

    groups: each optimizer's groups, and each saved optimizer's groups in the checkpoint.
    """
    kinds = [[kind_of(group) for group in of_one] for of_one in groups]
    if any(len(set(of_one)) < len(of_one) for of_one in kinds):
        yield
        return
    originals = [getattr(module, _KEYS) for module in _MODULES]
    for module in _MODULES:
        setattr(module, _KEYS, KIND)
    try:
        yield
    finally:
        for module, original in zip(_MODULES, originals, strict=True):
            setattr(module, _KEYS, original)
