"""Number formats of a run."""

from enum import StrEnum

from cloudai_mbridge.errors import BadInput


class Precision(StrEnum):
    """Number format of the layers' matrix products, by the names of `cmd_args.compute_dtype`."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP8_CS = "fp8_cs"
    FP8_DS = "fp8_ds"
    FP8_SC = "fp8_sc"
    FP8_MX = "fp8_mx"
    NVFP4 = "nvfp4"

    @property
    def is_32_bit(self) -> bool:
        """Whether weights and activations are stored in 32 bits."""
        return self in (Precision.FP32, Precision.TF32)

    @property
    def activation_bytes(self) -> int:
        """Bytes per value of the activations between layers."""
        return 4 if self.is_32_bit else 2


_OTHER_NAMES = {"fp8": Precision.FP8_CS, "mxfp8": Precision.FP8_MX, "fp16": Precision.BF16, "bfloat16": Precision.BF16}


def precision_named(name: str) -> Precision:
    """Return the precision called fp8_mx, FP8-MX, MXFP8, or FP8 (current scaling, as in the published tables).

    BadInput, which lists the known names, if unknown.
    """
    key = name.strip().lower().replace("-", "_")
    if key in _OTHER_NAMES:
        return _OTHER_NAMES[key]
    try:
        return Precision(key)
    except ValueError:
        raise BadInput(f"compute_dtype: unknown precision {name!r}; use one of {', '.join(Precision)}") from None
