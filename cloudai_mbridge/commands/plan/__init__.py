"""Commands that plan: rules, points, estimates, layouts."""

from pathlib import Path

from cloudai_mbridge.errors import BadInput


def require_new(option: str, path: Path) -> None:
    """Raise BadInput if a file that an option names exists."""
    if path.exists():
        raise BadInput(f"{option}: {path} exists; name another file, or remove it")


def write_new(option: str, path: Path, text: str) -> None:
    """Write the file that an option names; BadInput: it exists, or cannot be written."""
    require_new(option, path)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{option}: {path} cannot be written ({error.strerror}); name another file") from None
