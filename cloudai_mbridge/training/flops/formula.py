"""Which of the reference's FLOPs formulas: published TFLOP/s moved with it at unchanged step time."""

from enum import StrEnum


class Formula(StrEnum):
    """The formula's name and version, as reports carry it.

    OLD: Megatron-Bridge below 0.5, NeMo containers up to 26.04.01: a gated MLP counts as three projections only where
    the activation is SiLU, and sliding windows are counted as full attention. NEW: gated means three projections,
    windows count; everything else is equal.
    """

    OLD = "megatron-bridge/old"
    NEW = "megatron-bridge/new"

    @classmethod
    def named(cls, text: str) -> "Formula":
        """Return the formula of a full or a short name (`old`, `new`).

        Raises:
            ValueError: there is none of this name.
        """
        for formula in cls:
            if text in (formula.value, formula.value.partition("/")[2]):
                return formula
        raise ValueError(f"unknown FLOPs formula {text!r}; use {', '.join(cls)}, or old, new")

    @property
    def counts_windows(self) -> bool:
        """Whether a layer with a sliding window is cheaper than a full one."""
        return self is Formula.NEW

    @property
    def counts_every_gate(self) -> bool:
        """Whether a gated MLP has three projections whatever its activation is."""
        return self is Formula.NEW


NEW, OLD = Formula.NEW, Formula.OLD
FLOPS_FORMULA = NEW.value  # the training loop's
