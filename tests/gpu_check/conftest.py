"""Kits for machines that are not here."""

from pathlib import Path

import pytest

from cloudai_mbridge.gpu_check.kit import Device, Kit


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    """A kit of this machine, taken to have no GPU."""
    return Kit(tmp_path, Device())


@pytest.fixture
def h100(tmp_path: Path) -> Kit:
    """A kit of a machine with an H100 and Transformer Engine."""
    return Kit(
        tmp_path, Device("NVIDIA H100 80GB HBM3", gpu_type="h100", memory_gib=79.6, no_gpu="", no_transformer_engine="")
    )
