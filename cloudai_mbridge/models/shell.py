"""Texts that a shell or a path resolves: references to variables, the home directory, relative paths.

`$NAME` and `${NAME}` expand to that variable's value and `~` or a leading `~/` to the home directory, on the machine
that runs the script, as in CloudAI; an unset variable expands to nothing, and `\\$` is a dollar sign. Nothing else is
expanded: no command substitution, no `${NAME:-default}`, and no value is split into words. Relative paths of this
machine are resolved against the current directory of the command, as in CloudAI.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from cloudai_mbridge.training.credentials.find import REFERENCE, is_secret

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
HOME = r"\A~(?=/|\Z)"
# Text that a shell would interpret, and that is data here
_OTHER_FORM = re.compile(rf"`|\$(?!{_NAME}|\{{{_NAME}\}})[({{0-9!?#*@$-]")


def name_in(reference: str) -> str:
    return reference.strip("${}")


def expand(text: str, env: Mapping[str, str]) -> str:
    """Return the text with the values of variables in `env`; other references stay unchanged."""

    def value(match: re.Match[str]) -> str:
        piece = match[0]
        if piece == r"\$":
            return "$"
        return env.get("HOME", piece) if piece == "~" else env.get(name_in(piece), piece)

    return re.sub(rf"{HOME}|{REFERENCE}|\\\$", value, text)


def references(text: str) -> list[str]:
    """Return the names of the variables that a text refers to."""
    return [name_in(reference) for reference in re.findall(rf"(?<!\\){REFERENCE}", text)]


def has_other_forms(text: str) -> bool:
    """Return whether a shell would interpret more of a text than references: commands, or `${NAME:-word}`."""
    return bool(_OTHER_FORM.search(text.replace(r"\$", "")))


_SAFE = r"[A-Za-z0-9_@%+=:,./-]"
_AS_CLOUDAI = re.compile(rf"(?:{HOME})?(?:{_SAFE}|{REFERENCE})*")
_PIECE = re.compile(rf"""(?P<home>{HOME})|{REFERENCE}|\\\$|[$`"\\]|'|[^$`"\\']+""")
_QUOTED = {"$": r"\$", r"\$": r"\$", "`": r"\`", '"': r"\"", "\\": r"\\"}


def shell_word(text: str, *, in_single_quotes: bool = False) -> str:
    """Quote for bash.

    in_single_quotes: the launcher puts the word, of an assignment, between single quotes of its own, in a shell without
    `set -u`, and NeMo-Run replaces quotes, `&`, `<` and `>` as in HTML: it contains none of these. Words that need no
    quotes are written as CloudAI does.
    """
    if re.fullmatch(rf"{_SAFE}+", text) or (in_single_quotes and _AS_CLOUDAI.fullmatch(text)):
        return text
    if in_single_quotes:
        return "".join(map(_unquoted, _PIECE.finditer(text)))
    return '"' + "".join(map(_in_quotes, _PIECE.finditer(text))) + '"'


def launcher_word(text: str) -> str:
    """Quote a word of the launcher's command line. References to possible credentials are not expanded there."""
    return shell_word(re.sub(rf"\\\$|{REFERENCE}", _without_secret, text))


def _without_secret(match: re.Match[str]) -> str:
    return f"\\{match[0]}" if is_secret(name_in(match[0])) else match[0]


def _in_quotes(match: re.Match[str]) -> str:
    """Write a piece of a value for use between double quotes."""
    piece, is_home = match[0], match["home"] is not None  # `~` after a quote is literal
    if is_home or re.fullmatch(REFERENCE, piece):
        return f"${{{'HOME' if is_home else name_in(piece)}-}}"
    return _QUOTED.get(piece, piece)


def _unquoted(match: re.Match[str]) -> str:
    """Write a piece of a value for use in an assignment without quotes, whose expansions bash does not split."""
    piece, is_home = match[0], match["home"] is not None
    if is_home or re.fullmatch(REFERENCE, piece):
        return f"${{{'HOME' if is_home else name_in(piece)}}}"
    return "".join(_escaped(character) for character in ("$" if piece == r"\$" else piece))


def _escaped(character: str) -> str:
    if character == "\n":
        return "${IFS:2:1}"
    if character in "\"'&<>":
        return rf"$(printf \\{ord(character):03o})"
    return character if not character.isascii() or re.fullmatch(_SAFE, character) else f"\\{character}"


# Slurm expands %j and the like in the whole path of a job's output, including its working directory; any backslash in
# it turns expansion off
_SLURM_EXPANDS = re.compile(r"%[%A-Za-z0-9]|\\")


def slurm_pattern_in(path: str) -> str | None:
    """Return the pattern that Slurm would expand in a job's output path, which fails the job; None if safe."""
    found = _SLURM_EXPANDS.search(path)
    return found[0] if found else None


def absolute(path: str) -> str:
    """Return a path that means the same in every directory. `$NAME/x` and `~/x` are left to the shell."""
    if path.startswith(("/", "$", "~")) or not path:
        return path
    here = str(Path.cwd()).replace("$", r"\$")
    return str(Path(here) / path)


# Of pyxis, in place of the source of a mount
MOUNT_FORMS = ("tmpfs", "umount")


def absolute_mount(mount: str) -> str:
    """Return SOURCE[:TARGET[:FLAGS]] with an absolute source; `tmpfs:TARGET` and `umount:TARGET` stay."""
    source, colon, rest = mount.strip().partition(":")
    return mount.strip() if source in MOUNT_FORMS else f"{absolute(source)}{colon}{rest}"
