"""Programs that read a value after bash, and what they would make of it.

We quote for bash, the first reader. The next ones cannot be quoted for, so what they would interpret is refused:

- pyxis splits a list of mounts at commas and a mount at colons (args.c of 0.24)
- enroot sources the mounts as a bash script on the node, outside of the container, and splits their table at blanks;
  an image file that it mounts stands between single quotes in a script (pyxis_slurmstepd.c, runtime.sh of 4.1)
- NeMo-Run pastes srun's options, and Megatron-Bridge's launcher the words of its own command line, unquoted into
  scripts of the job (slurm.py of 0.11; `INLINE_TEMPLATE` of 0.3 to 0.6)
- bash expands the values of some variables when it starts, and enroot is a bash script
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cloudai_mbridge.models.shell import HOME, MOUNT_FORMS, name_in, references
from cloudai_mbridge.training.credentials.find import REFERENCE, is_secret


@dataclass(frozen=True)
class Reader:
    """A program behind bash. interprets: what it would not take as data. reason: begins before that text."""

    interprets: re.Pattern[str]
    reason: str


_ENROOT = Reader(re.compile(r"""["'$`\\]"""), "enroot reads a mount as a line of a shell script, on the node:")
_TABLE = Reader(re.compile(r"[\x00-\x20\x7f]"), "enroot splits a mount at blanks:")
_LIST = Reader(re.compile(","), "pyxis separates mounts with")
_MOUNT = Reader(re.compile(":"), "pyxis separates the parts of a mount with")
_BATCH = Reader(re.compile(r"[;&|<>(){}]"), "NeMo-Run puts it without quotes into the job's batch script:")
_RANKS = Reader(
    re.compile(r"[;&|<>()`\n\r]|\$(?![A-Za-z_]|\{[A-Za-z_][A-Za-z0-9_]*\}|\Z)."),
    "the launcher puts it without quotes into the ranks' shell script:",
)
_IMAGE_FILE = Reader(re.compile(r"['\x00-\x1f\x7f]"), "enroot puts the path between single quotes into a shell script:")
_EXPANDED = Reader(re.compile(r"[$`]"), "bash runs commands in this variable's value whenever it starts, on the node:")

# Values that become a part of a mount; values that stand in the batch script of the launcher's job, too
_MOUNTED = (_ENROOT, _TABLE, _LIST, _MOUNT)
_PASTED = (*_MOUNTED, _BATCH)
_VALUE = "\ue000"  # stands for the value of a variable, which is not known here
_FLAGS = re.compile(rf"[\w=.%@+-]*|{_VALUE}", re.ASCII)
_REFERENCE_OF_IMAGE = re.compile(rf"(?:[\w$.%+=!*-]+@)?(?:[\w.:/@#-]|{_VALUE})+", re.ASCII)
_PASTED_IMAGE = re.compile(rf"(?:[\w.:/@#%+=-]|{_VALUE})+", re.ASCII)
# docker://USER@ before a registry, in Docker's spelling: a first part with a dot or a port
_OF_DOCKER = re.compile(
    r"((?:docker://)?(?:[^/@#]+@)?)((?:[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|localhost|[A-Za-z0-9-]+(?=:))(?::[0-9]+)?)/(?=[^/])"
)


def _found(text: str, readers: Sequence[Reader]) -> str | None:
    for reader in readers:
        if match := reader.interprets.search(text):
            return f"{reader.reason} {match[0]!r}"
    return None


def _known(text: str, *, expands: bool) -> str:
    """Return a text with a sign for each part that bash expands. References to credentials stay as they are."""
    if not expands:
        return text

    def value(match: re.Match[str]) -> str:
        return match[0] if is_secret(name_in(match[0])) and match[0] != "~" else _VALUE

    return re.sub(rf"{HOME}|(?<!\\){REFERENCE}", value, text)


def path_problem(path: str, *, is_pasted: bool, expands: bool = True) -> str | None:
    """Return why a path cannot be mounted into a container, None if it can.

    is_pasted: Megatron-Bridge's launcher submits the job. expands: bash expands references in the path.
    """
    return _found(_known(path, expands=expands), _PASTED if is_pasted else _MOUNTED)


def mount_problem(mount: str, *, is_pasted: bool, expands: bool = True) -> str | None:
    """Return why pyxis, enroot or the launcher would not take SOURCE[:TARGET[:FLAGS]] as it is written.

    Arguments as of `path_problem`.
    """
    text = _known(mount, expands=expands)
    if problem := _found(text, (_ENROOT, _TABLE, _LIST, *((_BATCH,) if is_pasted else ()))):
        return problem
    source, *rest = text.split(":", 2)
    if text == _VALUE:  # may hold a whole mount
        return None
    if source not in MOUNT_FORMS and not source.startswith(("/", ".", _VALUE)):
        return f"{source!r} is not the path of a source, nor {' or '.join(MOUNT_FORMS)}"
    target = rest[0] if rest else ""
    if (rest or source in MOUNT_FORMS) and not target.startswith(("/", ".", _VALUE)):
        return f"{target!r} is not the path of a target; a path with a colon cannot be mounted"
    if len(rest) > 1 and not _FLAGS.fullmatch(rest[1]):
        return f"{rest[1]!r} is not a list of mount flags such as ro+nosuid"
    return None


def image_problem(image: str, *, is_pasted: bool, expands: bool = True) -> str | None:
    """Return why an image is not taken as it is written. Arguments as of `path_problem`."""
    text = _known(image, expands=expands)
    if text.startswith(("/", ".", _VALUE)):
        return _found(text, (_ENROOT, _TABLE, _BATCH) if is_pasted else (_IMAGE_FILE,))
    if (_PASTED_IMAGE if is_pasted else _REFERENCE_OF_IMAGE).fullmatch(text):
        return None
    return "is neither the path of a file, from / or ., nor an image such as nvcr.io#nvidia/nemo:26.02.00"


def word_problem(word: str) -> str | None:
    """Return what a word of the launcher's command line would do in the ranks' shell script, None if nothing."""
    return _found(word, (_RANKS,))


def in_enroots_spelling(image: str) -> str:
    """Return an image with # behind its registry. Docker's / there makes older enroot look for it on Docker Hub."""
    if "#" in image or image.startswith(("/", ".")):
        return image
    return _OF_DOCKER.sub(r"\1\2#", image, count=1) if _OF_DOCKER.match(image) else image


def _list_problem(mounts: str, *, expands: bool = False) -> str | None:
    problems = (mount_problem(mount, is_pasted=False, expands=expands) for mount in mounts.split(","))
    return next(filter(None, problems), None)


def _names_problem(names: str, *, expands: bool = False) -> str | None:
    bad = [name for name in names.split(",") if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
    return f"pyxis puts it into enroot's shell script: {bad[0]!r} is not the name of a variable" if bad else None


def _one_image_problem(image: str, *, expands: bool = False) -> str | None:
    return image_problem(image, is_pasted=False, expands=expands)


# Options of pyxis, for sbatch, srun and the environment
_OPTIONS: Mapping[str, Callable[..., str | None]] = {
    "container-image": _one_image_problem,
    "container-mounts": _list_problem,
    "container-env": _names_problem,
}
_SHORTEST = len("--container-")


def option_problems(words: Sequence[str]) -> Iterator[str]:
    """Yield why options of srun or sbatch do not reach enroot as they are written. No shell expands them."""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        for option, problem_of in _OPTIONS.items():
            if len(name) > _SHORTEST and f"--{option}".startswith(name):
                given = value if equals else following
                if problem := problem_of(given):
                    yield f"--{option}={given}: {problem}"


def names_image(words: Sequence[str]) -> bool:
    """Return whether options of srun start a container."""
    return any(word.partition("=")[0] == "--container-image" for word in words)


# Variables whose value bash expands as it starts or traces
_EVALUATED = ("BASH_ENV", "ENV", "PS4")


def variable_problems(env: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield the name of each variable of a job whose value would be interpreted, and why. env: name -> its values."""
    for name in _EVALUATED:
        for value in reached(env.get(name, ()), env):
            if problem := _found(_known(value, expands=True), (_EXPANDED,)):
                yield name, problem
    for option, problem_of in _OPTIONS.items():
        name = f"PYXIS_{option.upper().replace('-', '_')}"
        for value in env.get(name, ()):
            if problem := problem_of(value, expands=True) or reached_problem([value], env):
                yield name, problem


def reached_problem(texts: Sequence[str], env: Mapping[str, Sequence[str]]) -> str | None:
    """Return what enroot would make of the value of a variable that one of the texts refers to. env: as above."""
    values = (_known(value, expands=True) for value in reached(texts, env)[len(texts) :])
    return next(filter(None, (_found(value, (_ENROOT,)) for value in values)), None)


def reached(texts: Sequence[str], env: Mapping[str, Sequence[str]]) -> list[str]:
    """Return texts, and the values of the variables that they refer to, directly or not."""
    found, names = list(texts), set[str]()
    for text in found:  # grows
        for name in references(text):
            if name not in names:
                names.add(name)
                found += env.get(name, ())
    return found


def guard(mounts: Sequence[str], ending: str, *more: str) -> list[str]:
    """Return the lines of a script that end it if enroot would interpret the value of a variable in a mount.

    ending: commands. more: names of further variables that are mounted.
    """
    names = list(dict.fromkeys([*more, *(name for mount in mounts for name in references(mount))]))
    if not names:
        return []
    text = f"error: a mount contains one of \" ' $ ` \\, which enroot would interpret; see {', '.join(names)}"
    return [
        f"""case "{"".join(f"${{{name}-}}" for name in names)}" in *[\\"\\'\\$\\`\\\\]*)""",
        f"  echo {shlex.quote(text)} >&2",
        f"  {ending} ;;",
        "esac",
    ]
