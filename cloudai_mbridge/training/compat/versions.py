"""Which releases of Megatron-Core are supported. Standard library only: planning asks this where torch is missing.

Code that has to know what a release can do asks for the feature. The number serves to refuse what was never tested, and
to say which release brings a field.
"""

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version

PACKAGE = "megatron-core"
# Release -> the version that all tests have passed with
TESTED = {"0.16": "0.16.1", "0.17": "0.17.1", "0.18": "0.18.2", "0.19": "0.19.2"}
RELEASES = tuple(TESTED)
_OLDEST = (0, 16, 1)


@cache
def installed_version() -> str | None:
    """Return the version of the Megatron-Core that this Python would import, None where there is none."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def installed_release() -> str | None:
    """Return its release such as "0.19", None where there is none or it is not supported."""
    found = installed_version()
    return None if found is None or why_unsupported(found) else ".".join(found.split(".")[:2])


def why_unsupported(found: str) -> str | None:
    """Return one line for a version that was not tested, with the remedy; None for one of a tested release."""
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", found)
    parts = tuple(int(part or 0) for part in numbers.groups()) if numbers else ()
    if numbers and f"{parts[0]}.{parts[1]}" in TESTED and parts >= _OLDEST:
        return None
    *others, last = TESTED.values()
    return f"{PACKAGE} {found} is not supported; install {', '.join(others)} or {last}"
