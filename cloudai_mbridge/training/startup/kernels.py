"""Packages of kernels without which Megatron-Core fails while building a model."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from cloudai_mbridge.training.errors import ConfigError

# Kind of layer, by its letter in a pattern or the variant's name -> its imports and the extra that installs them
_MAMBA = (("mamba_ssm", "causal_conv1d"), "mamba")
_LINEAR = (("fla",), "linear-attention")
_SPARSE = (("fast_hadamard_transform",), "sparse-attention")
_PACKAGES = {"M": _MAMBA, "G": _LINEAR, "gated_delta_net": _LINEAR, "D": _SPARSE, "dsa": _SPARSE}
_WORDS = {"M": "Mamba layers", "G": "Gated DeltaNet", "D": "sparse attention"}


def check_kernels(model: Any) -> None:
    """Refuse layers whose package is missing. Raises ConfigError: the layers, the package and the extra."""
    for kind in dict.fromkeys(_kinds(model)):
        packages, extra = _PACKAGES.get(kind, ((), ""))
        # it is for the rotation alone, which a model of Megatron-Core 0.19 may be without
        if extra == "sparse-attention" and not getattr(model, "dsa_indexer_rotate_activation", True):
            continue
        if missing := [each for each in packages if find_spec(each) is None]:
            what = _WORDS.get(kind, f"model.experimental_attention_variant = {kind!r}")
            raise ConfigError(
                f"{what}: the kernels of {' and '.join(missing)} are not installed; install cloudai-mbridge[{extra}]"
            )


def _kinds(model: Any) -> Iterator[str]:
    if (variant := getattr(model, "experimental_attention_variant", None)) is not None:
        yield variant
    if getattr(model, "is_hybrid_model", False) and hasattr(model, "hybrid_layer_pattern"):
        yield from model.hybrid_layer_pattern or "M"  # ratios alone leave Mamba in the rest
