"""Write small files so that a reader sees the old content or the new one, whatever is killed when."""

import io
import os
from pathlib import Path
from typing import Any

import torch


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by a file with `data`, on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_torch(path: Path, value: Any) -> None:
    """Replace `path` by what `torch.save` makes of `value`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_bytes(path, buffer.getvalue())


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
