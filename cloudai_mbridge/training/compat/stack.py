"""The software that trains: Megatron-Core and other packages that an interpreter would import. Standard library only.

The interpreter is asked, without importing torch; one that is elsewhere, in a container for example, is unknown.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from cloudai_mbridge.training.compat import versions
from cloudai_mbridge.training.schema.packages import MODULES

ENGINE = "transformer_engine"
_ASKED = (ENGINE, *MODULES)
_TIMEOUT_S = 20.0
_PATH = "PYTHONPATH"
# Run by the interpreter: arguments are the file of `versions`, and names of modules
_QUESTION = """
import json, runpy, sys
from importlib.util import find_spec
core = runpy.run_path(sys.argv[1])["installed_version"]()
print(json.dumps({"core": core, "modules": [name for name in sys.argv[2:] if find_spec(name) is not None]}))
"""


@dataclass(frozen=True)
class Stack:
    """An interpreter's packages. core: the version of Megatron-Core, None if missing."""

    python: str
    core: str | None
    modules: frozenset[str]

    @property
    def release(self) -> str | None:
        """The release of Megatron-Core, such as "0.19"; None if missing or unsupported."""
        is_usable = self.core is not None and versions.why_unsupported(self.core) is None
        return ".".join(self.core.split(".")[:2]) if is_usable and self.core is not None else None


def stack_of(python: str | None, variables: Mapping[str, str]) -> Stack | None:
    """Return the packages of an interpreter; None if it cannot be asked here.

    python: its path; None: the one that runs this program. variables: of its environment, beside this process's.
    """
    path = variables.get(_PATH)
    if python is None and path is None:
        return _here()
    return _asked(python or sys.executable, os.environ.get(_PATH) if path is None else path)


@cache
def _here() -> Stack:
    found = frozenset(name for name in _ASKED if name in sys.modules or find_spec(name) is not None)
    return Stack(sys.executable, versions.installed_version(), found)


@cache
def _asked(python: str, path: str | None) -> Stack | None:
    if not Path(python).is_absolute() or not os.access(python, os.X_OK):
        return None
    env = {**os.environ, **({} if path is None else {_PATH: path})}
    command = [python, "-c", _QUESTION, str(Path(versions.__file__)), *_ASKED]
    try:
        answer = subprocess.run(command, env=env, capture_output=True, timeout=_TIMEOUT_S, check=True, text=True)
        found = json.loads(answer.stdout)
        core, modules = found["core"], frozenset(map(str, found["modules"]))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None
    return Stack(python, core if core is None else str(core), modules)
