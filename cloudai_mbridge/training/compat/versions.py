"""Which releases of Megatron-Core are supported.

Standard library only: planning asks where torch is missing. Code that has to know what a release can do asks for the
feature, not for the number.
"""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "megatron-core"
# Release -> the version that all tests have passed with
TESTED = {"0.16": "0.16.1", "0.17": "0.17.1", "0.18": "0.18.2", "0.19": "0.19.2"}
RELEASES = tuple(TESTED)


@cache
def installed_version() -> str | None:
    """Return the version of the Megatron-Core that this Python would import, None where there is none.

    Read from its `package_info.py`: a clone on PYTHONPATH, as in NeMo containers, has no metadata, or another one's.
    """
    try:
        core = find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    if core is None or not core.submodule_search_locations:
        return None
    info = Path(next(iter(core.submodule_search_locations)), "package_info.py")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?([^'\"\s]*)", text, re.MULTILINE))
    return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format_map(parts) if len(parts) == 4 else "of unknown version"


def installed_release() -> str | None:
    """Return its release such as "0.19", None where there is none or it is not supported."""
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
