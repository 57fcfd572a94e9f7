"""Supported releases of Megatron-Core, and the hardware and libraries that a machine lacks for training.

Standard library only: planning works without torch. Code that depends on a feature of a release checks the feature,
not the number.
"""

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "megatron-core"
# Release -> the version that all tests have passed with
TESTED = {"0.16": "0.16.1", "0.17": "0.17.1", "0.18": "0.18.2", "0.19": "0.19.2"}
RELEASES = tuple(TESTED)
GPU, TRANSFORMER_ENGINE = "a GPU", "Transformer Engine and a GPU"
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_NVRX, _NVRX_CODE = "nvidia-resiliency-ext", "dist_checkpointing/strategies/nvrx.py"


@cache
def installed_version() -> str | None:
    """Return the version of the Megatron-Core that this Python would import, None if it is missing.

    Read from its `package_info.py`: a clone on PYTHONPATH, as in NeMo containers, has no metadata, or another one's.
    """
    core = _core()
    if core is None:
        return None
    text = _text(core / "package_info.py")
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?([^'\"\s]*)", text, re.MULTILINE))
    return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format_map(parts) if len(parts) == 4 else "of unknown version"


def _core() -> Path | None:
    """Return the directory that `megatron.core` would be imported from."""
    try:
        core = find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    locations = None if core is None else core.submodule_search_locations
    return Path(next(iter(locations))) if locations else None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def why_unusable() -> str | None:
    """Return one line if the installed Megatron-Core cannot train: its version, or another installed package.

    None if it can, or if it is missing.
    """
    found, core = installed_version(), _core()
    if found is None:
        return None
    if reason := why_unsupported(found):
        return reason
    # The version of nvidia-resiliency-ext that Megatron-Core asserts while it is imported, since 0.17
    wanted = re.search(r'^NVRX_MIN_VERSION = "([\d.]+)"', _text(core / _NVRX_CODE) if core else "", flags=re.MULTILINE)
    try:
        beside = version(_NVRX)
    except PackageNotFoundError:
        return None
    if wanted is None or _numbers(beside) >= _numbers(wanted[1]):
        return None
    return (
        f"{PACKAGE} {found} cannot be imported with {_NVRX} {beside}; "
        f"install {wanted[1]} or newer of it, or uninstall it"
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def installed_release() -> str | None:
    """Return its release such as "0.19", None if it is missing or unsupported."""
    found = installed_version()
    return None if found is None or why_unsupported(found) else ".".join(found.split(".")[:2])


def why_unsupported(found: str) -> str | None:
    """Return one line for a version older than the tested one of its release, a preview, or one of another release.

    None for the tested version of a release and for its later patches.
    """
    numbers = re.fullmatch(r"(\d+\.\d+)\.(\d+)(\+.*)?", found)
    if numbers and numbers[1] in TESTED and int(numbers[2]) >= int(TESTED[numbers[1]].rpartition(".")[2]):
        return None
    *others, last = TESTED.values()
    return f"{PACKAGE} {found} is not supported; install {', '.join(others)} or {last}, or a later patch of one of them"


def lacking() -> frozenset[str]:
    """Return which of GPU and TRANSFORMER_ENGINE this machine certainly lacks."""
    if not any(Path(driver).exists() for driver in GPU_DRIVERS):
        return frozenset({GPU, TRANSFORMER_ENGINE})
    return frozenset() if find_spec("transformer_engine") else frozenset({TRANSFORMER_ENGINE})
