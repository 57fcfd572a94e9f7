"""Values in shell scripts: data, except references to variables and the home directory.

`$NAME` and `${NAME}` expand to that variable's value and `~` or a leading `~/` to the home directory, on the machine
that runs the script, as in CloudAI; an unset variable expands to nothing, and `\\$` is a dollar sign. Nothing else is
expanded: no command substitution, no `${NAME:-default}`, and no value is split into words.
"""

import re

from cloudai_mbridge.models.values.references import HOME, name_in
from cloudai_mbridge.training.credentials.find import REFERENCE, is_secret

_SAFE = r"[A-Za-z0-9_@%+=:,./-]"
_AS_CLOUDAI = re.compile(rf"(?:{HOME})?(?:{_SAFE}|{REFERENCE})*")
_PIECE = re.compile(rf"""(?P<home>{HOME})|{REFERENCE}|\\\$|[$`"\\]|'|[^$`"\\']+""")
_QUOTED = {"$": r"\$", r"\$": r"\$", "`": r"\`", '"': r"\"", "\\": r"\\"}


def shell_word(text: str, *, in_single_quotes: bool = False) -> str:
    """Quote for bash.

    in_single_quotes: the launcher puts the word between single quotes of its own, in a shell without `set -u`. Words
    that need no quotes stay unquoted then, as CloudAI writes them.
    """
    if re.fullmatch(rf"{_SAFE}+", text) or (in_single_quotes and _AS_CLOUDAI.fullmatch(text)):
        return text
    single, unset = (r"$(printf \\047)", "") if in_single_quotes else ("'", "-")
    return '"' + "".join(_in_quotes(piece, single, unset) for piece in _PIECE.finditer(text)) + '"'


def launcher_word(text: str) -> str:
    """Quote a word of the launcher's command line. References to possible credentials are not expanded there."""
    return shell_word(re.sub(rf"\\\$|{REFERENCE}", _without_secret, text))


def _without_secret(match: re.Match[str]) -> str:
    return f"\\{match[0]}" if is_secret(name_in(match[0])) else match[0]


def _in_quotes(match: re.Match[str], single: str, unset: str) -> str:
    """Write a piece of a value for use between double quotes."""
    piece, is_home = match[0], match["home"] is not None  # `~` after a quote is literal
    if is_home or re.fullmatch(REFERENCE, piece):
        return f"${{{'HOME' if is_home else name_in(piece)}{unset}}}"
    return single if piece == "'" else _QUOTED.get(piece, piece)
