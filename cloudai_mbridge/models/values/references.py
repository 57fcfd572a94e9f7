"""References to variables in values: `$NAME`, `${NAME}`, and `~` or a leading `~/` for the home directory."""

import re
from collections.abc import Mapping

from cloudai_mbridge.training.credentials.find import REFERENCE

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
