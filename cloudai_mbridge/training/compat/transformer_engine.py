"""Which Transformer Engine is installed.

Without it, Megatron-Core 0.16 has no version and its own test fails; newer releases say 0.0.0.
"""

from megatron.core.utils import get_te_version, is_te_min_version


def have_te() -> bool:
    """Tell whether Transformer Engine can be imported."""
    version = get_te_version()
    return version is not None and str(version) != "0.0.0"


def te_is_at_least(version: str) -> bool:
    """Tell whether Transformer Engine is installed in `version` or a later one."""
    return have_te() and bool(is_te_min_version(version))


def describe_te() -> str:
    """Say what is installed, as an error message should."""
    return f"{get_te_version()} is installed" if have_te() else "none is installed"
