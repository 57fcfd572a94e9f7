"""Text of logs and arguments without what looks like a credential.

Known are: the user of a URL (`://user:password@`, `://token@`), tokens with the prefix of a service, what an
Authorization header or "Bearer" is followed by, and the value of a variable in upper case whose name is a credential's
(`API_KEY=...`).
A credential in any other shape stays.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from cloudai_mbridge.models.credentials import BEARER, TOKEN, is_secret

MASK = "***"
_USER = re.compile(r"://[^\s/\"'<>]*@")
_VARIABLE = re.compile(r"""(?<![A-Za-z0-9_])([A-Z][A-Z0-9_]{2,63})(["']?\s{0,3}[=:]\s{0,3})("[^"]*"?|'[^']*'?|\S+)""")


def redacted(text: str) -> str:
    """Return the text with *** for what looks like a credential. Redacting it again changes nothing."""
    text = BEARER.sub(rf"\g<1>{MASK}", _USER.sub(f"://{MASK}@", text))
    return _VARIABLE.sub(_without_value, TOKEN.sub(MASK, text))


def _without_value(match: re.Match[str]) -> str:
    name = match[1]
    # a number of tokens is no token, and the second colon of "A_KEY::b" no value
    if not is_secret(name) or name.endswith("TOKENS") or MASK in match[3]:
        return match[0]
    return f"{name}{match[2]}{MASK}"


def redacted_in(value: Any) -> Any:
    """Return a value with every text in it redacted; names of tables stay, and what has no text stays the same."""
    if isinstance(value, str):
        return value if isinstance(value, Enum) else redacted(value)
    if isinstance(value, Mapping):
        return {name: _named(name, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redacted_in(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: redacted_in(getattr(value, each.name)) for each in fields(value)})
    return value


def _named(name: Any, value: Any) -> Any:
    """Return a table's value; that of a variable in upper case is judged by its name, too."""
    whole = isinstance(name, str) and isinstance(value, str) and name.isupper()
    return MASK if whole and redacted(f"{name}={value}") == f"{name}={MASK}" else redacted_in(value)
