"""Write files so that a reader sees the old content or the new one, whatever is killed when."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch


def write_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Replace `path` by the contents that `write` puts into the given file, on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    handle = os.open(path.parent, os.O_RDONLY)  # the name has to reach the disk, too
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by a file with `data`."""
    write_file(path, lambda file: file.write(data))


def write_torch(path: Path, value: Any) -> None:
    """Replace `path` by `value`, serialized with `torch.save`."""
    write_file(path, lambda file: torch.save(value, file))
