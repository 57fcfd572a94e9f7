"""Software of this process, None if unknown. Standard library only: reports use it too."""

import functools
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

# Packages that determine speed and numbers, in addition to the interpreter
_PACKAGES = (
    "cloudai-mbridge",
    "apex",
    "flash-attn",
    "megatron-bridge",
    "megatron-core",
    "numpy",
    "nvidia-modelopt",
    "nvidia-resiliency-ext",
    "torch",
    "triton",
)
_FAMILIES = ("nvidia-cublas", "nvidia-cudnn", "nvidia-nccl", "transformer-engine")  # one package per CUDA version
_CHECKOUT = Path(__file__).resolve().parents[3]
_TIMEOUT_S = 10.0


def package_version(name: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide speed and numbers, as far as they are installed."""
    names = {str(each.name).lower().replace("_", "-") for each in distributions()}
    wanted = sorted(name for name in names if name in _PACKAGES or name.startswith(_FAMILIES))
    return {name: found for name in wanted if (found := package_version(name)) is not None}


def git_state(directory: Path = _CHECKOUT) -> dict[str, Any] | None:
    """Return the commit of a checkout, and whether its tracked files differ from it; None if it is not a checkout.

    directory: the root of the checkout; by default the checkout that this package was imported from. "dirty" is None if
    git does not answer in time.
    """
    if not (directory / ".git").exists():
        return None
    git = ("git", "--no-optional-locks", "-C", str(directory))
    commit = output_of(*git, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = output_of(*git, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def git_state_of(path: Path) -> dict[str, Any] | None:
    """Return the state of the checkout that a file is in, as `git_state`; None if it is in none."""
    root = next((parent for parent in path.resolve().parents if (parent / ".git").exists()), None)
    return None if root is None else git_state(root)


def output_of(*command: str) -> str | None:
    """Return a command's output, None if it fails, is missing or takes longer than ten seconds.

    Git's variables are not passed on: GIT_DIR, for example, would name another checkout.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
