"""References to variables in values: `$NAME`, `${NAME}`, and `~` or a leading `~/` for the home directory."""

import re
from collections.abc import Mapping

from cloudai_mbridge.training.credentials.shapes import REFERENCE

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
HOME = r"\A~(?=/|\Z)"
# What a shell would act on, and is data here
_OTHER_FORM = re.compile(rf"`|\$(?!{_NAME}|\{{{_NAME}\}})[({{0-9!?#*@$-]")


def name_in(reference: str) -> str:
    return reference.strip("${}")


def expand(text: str, env: Mapping[str, str]) -> str:
    """Return the text with the values of the variables that `env` has; a reference to another stays as it is."""

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
    """Return whether a shell would act on more of a text than on references: on commands, or on `${NAME:-word}`."""
    return bool(_OTHER_FORM.search(text.replace(r"\$", "")))
