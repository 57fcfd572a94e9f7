"""Values of environment variables in shell scripts: data, but for references to other variables.

`$NAME` and `${NAME}` stand for that variable's value in the job, as in CloudAI, where the job's shell expands them;
`\\$` is a dollar sign. Nothing else is acted on: no command substitution, no `${NAME:-default}`.
"""

import re
import shlex
from collections.abc import Iterator

_REFERENCE = r"\$(?:[A-Za-z_][A-Za-z0-9_]*|\{[A-Za-z_][A-Za-z0-9_]*\})"
_PLAIN = rf"(?:[A-Za-z0-9_@%+=:,./-]|{_REFERENCE})*"
_PIECE = re.compile(rf"""{_REFERENCE}|\\\$|[$`"\\]|'|[^$`"\\']+""")
_QUOTED = {"$": r"\$", r"\$": r"\$", "`": r"\`", '"': r"\"", "\\": r"\\", "'": r'"$(printf \\047)"'}


def shell_word(text: str) -> str:
    """Quote for bash without single quotes, since the launcher puts commands between single quotes of its own."""
    if re.fullmatch(_PLAIN, text):
        return text
    return "".join(_QUOTED.get(piece, f'"{piece}"') for piece in _PIECE.findall(text))


def script_word(text: str) -> str:
    """Quote for a script of our own, where a variable that is not set stands for nothing (`set -u` holds)."""
    return "".join(_pieces(text)) or "''"


def _pieces(text: str) -> Iterator[str]:
    plain = ""
    for piece in _PIECE.findall(text):
        if re.fullmatch(_REFERENCE, piece):
            yield shlex.quote(plain) if plain else ""
            plain = ""
            yield f'"${{{piece.strip("${}")}-}}"'
        else:
            plain += "$" if piece == r"\$" else piece
    yield shlex.quote(plain) if plain else ""
