"""Variables of `env_vars`, set before CUDA, torch.distributed and Transformer Engine read them, and the variable that
binds a rank to cores and memory near its GPU, as upstream's launcher does with numactl. Imports no torch."""

import os
import shutil
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from cloudai_mbridge.training.errors import ConfigError

_SECTION = "env_vars"
DUMP = "MBRIDGE_DUMP_ENV"  # set: rank 0 writes its environment
BINDING = "MBRIDGE_BINDING"  # the ranks that share a NUMA node; with cores of their own N,CORES
_APART = 16  # cores from one rank's first to the next one's


def set_variables(variables: Mapping[str, Any]) -> None:
    """Set variables that the environment lacks: the launcher's and the user's win.

    ConfigError: an invalid name, or a value other than text, number or boolean.
    """
    for name, value in variables.items():
        if not isinstance(name, str) or not name or set(name) & {"=", "\0"}:
            raise ConfigError(f"env_vars: {name!r} is not the name of a variable")
        if not isinstance(value, str | int | float):
            raise ConfigError(f"env_vars.{name}: a {type(value).__name__} is not a text, number or boolean")
        os.environ.setdefault(name, str(value))


def set_variables_of_file(path: Path, overrides: Sequence[str]) -> None:
    """Set the variables of a configuration file and its overrides, before anything else of it is read.

    An unreadable file is left to the reader of the whole file, which reports the error.
    """
    from cloudai_mbridge.training.config.text.yaml_text import MAX_CHARS, parse_json, parse_yaml, scalar

    try:
        text = path.read_text(encoding="utf-8")[: MAX_CHARS + 1]
        table = (parse_json if path.suffix == ".json" else parse_yaml)(text).get(_SECTION) or {}
        given = (text.partition("=") for text in overrides if text.startswith(f"{_SECTION}."))
        table |= {key.partition(".")[2].strip(): scalar(value.strip()) for key, _, value in given}
    except (OSError, ValueError, AttributeError, TypeError):
        return
    set_variables(table)


def dump_variables(env: Mapping[str, str] = os.environ) -> None:
    """Write the environment of rank 0 to env_JOB.log, readable by its owner alone, *** for possible credentials.

    ConfigError: it cannot be written.
    """
    if not env.get(DUMP) or env.get("RANK", "0") != "0":
        return
    from cloudai_mbridge.training.credentials.scrub import redacted_in

    path = Path(f"env_{env.get('SLURM_JOB_ID', 'local')}.log")
    lines = [f"{name}={value!r}\n" for name, value in sorted(redacted_in(dict(env)).items())]
    try:
        with open(path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.writelines(lines)
    except OSError as error:
        raise ConfigError(f"dump_env: {path} cannot be written: {error.strerror}") from None


def bind(env: MutableMapping[str, str] = os.environ, argv: Sequence[str] = sys.orig_argv) -> None:
    """Start this process again under numactl, if the environment sets how it is bound.

    ConfigError: the variable cannot be read, or numactl is not installed.
    """
    if not (text := env.pop(BINDING, "")):
        return
    words = [*_numactl(text, int(env.get("LOCAL_RANK", "0"))), *argv]
    if shutil.which(words[0]) is None:
        raise ConfigError("enable_pct_binding: numactl is not installed on this node; install it, or set it to false")
    sys.stdout.flush()
    os.execvp(words[0], words)  # noqa: S606 - no shell


def _numactl(text: str, local_rank: int) -> list[str]:
    try:
        ranks, *cores = map(int, text.split(","))
        node = local_rank // ranks
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{BINDING} = {text!r} is not RANKS or RANKS,CORES") from None
    own = ",".join(str(_APART * local_rank + core) for core in range(cores[0])) if cores else ""
    return ["numactl", f"--cpunodebind={node}", f"--membind={node}", *(["-C", own] if own else [])]
