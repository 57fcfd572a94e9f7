"""How Megatron-Core finds a parameter group in a checkpoint: from 0.19 on its learning rates are part of its identity.

A run with another learning rate then stops with a KeyError, before the schedule says what differs and before
`override_opt_param_scheduler` can act. While a state is loaded, groups are found by their kind, as in older releases.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer import distrib_optimizer, optimizer

_MODULES = (optimizer, distrib_optimizer)
_KEYS = "param_group_identifier_keys"
# What tells groups apart in every release
KIND = ("wd_mult", "lr_mult", "is_decoupled_lr", "is_expert_parallel")


def kind_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a group is, in the order of `KIND`; NeMo's names of the multipliers are known, too."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in KIND)


@contextmanager
def found_by_kind(parts: Sequence[Any]) -> Iterator[None]:
    """Let the optimizers `parts` find their groups by kind; by all of Megatron's keys where two are of one kind."""
    kinds = [[kind_of(group) for group in part.optimizer.param_groups] for part in parts]
    if any(len(set(of_part)) < len(of_part) for of_part in kinds):
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
