"""Redaction of likely credentials in the text of logs, arguments and configurations.

It covers all shapes in which a credential is refused elsewhere, and some that occur only in the output of programs:
any user of a URL, `user:password@host` within a line, and an option before its value (`--hf_token ...`).
A credential in any other shape stays.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any

from cloudai_mbridge.training.credentials.find import (
    HOST,
    PRIVATE_KEY,
    SHORT_OPTIONS,
    credential_spans,
    is_assigned_credential,
)

MASK = "***"
_SHORT = 200  # characters
_MOST_PASSES = 5  # text next to a credential may look like a credential now
_USER = re.compile(r"(?<=://)[^\s/\"'<>]*@")
# In the value of an option only before a host that has a domain or a port: not in --comment=run:7@team
_USER_WITHOUT_SCHEME = re.compile(
    r"""(?<![^\s"'(])(?!mailto:)[^\s/@:"'=(,]{1,64}:[^\s/@"']{1,200}@(?!sha\d+:|\d+(?![A-Za-z0-9.-]))(?=[A-Za-z0-9])"""
    rf"""|(?<=[=,])[^\s/@:"'=(,]{{1,64}}:[^\s/@"',]{{1,200}}@(?!sha\d+:){HOST}"""
)
# Also in a list as Python and JSON write it: ['--hf_token', 'x']
_OPTION = re.compile(
    r"""(?<![^\s"'\[(,])(--[A-Za-z][A-Za-z0-9_-]{0,63}|-hf|-wdk)(\s{1,3}|["'],\s{0,3}["'])([^\s"'-][^\s"']*)"""
)


def redacted(text: str) -> str:
    """Return the text with *** for likely credentials. Redacting it again changes nothing."""
    return _redacted_short(text) if len(text) <= _SHORT else _redacted(text)


def _redacted(text: str) -> str:
    for _ in range(_MOST_PASSES):
        before, text = text, _masked(text)
        if text == before:
            break
    return text


# The same names and words are in every run of a report
_redacted_short = lru_cache(maxsize=10_000)(_redacted)


def without_users(text: str) -> str:
    """Return the text without users and passwords in URLs: it can be used again, with other credentials."""
    return _USER.sub("", text)


def _masked(text: str) -> str:
    text = _USER_WITHOUT_SCHEME.sub(f"{MASK}@", _USER.sub(f"{MASK}@", text))
    text = _OPTION.sub(_without_value, text)
    pieces, end = [], 0
    for start, stop in credential_spans(text):
        if start >= end:
            pieces += [text[end:start], MASK]
        end = max(end, stop)
    return "".join([*pieces, text[end:]])


def redacted_lines(text: str) -> list[str]:
    """Return the lines of a text, redacted one by one; of a private key, which has many, one *** is left."""
    return [redacted(line) for line in PRIVATE_KEY.sub(MASK, text).splitlines()]


def _without_value(match: re.Match[str]) -> str:
    option, between, value = match.groups()
    name = SHORT_OPTIONS.get(option, option).strip("-").replace("-", "_")
    return f"{option}{between}{MASK}" if is_assigned_credential(name, value) else match[0]


def redacted_in(value: Any) -> Any:
    """Return a value with every text in it redacted, names in tables too; values without text stay the same."""
    if isinstance(value, str):
        return value if isinstance(value, Enum) else redacted(value)
    if isinstance(value, Mapping):
        return {
            redacted_in(name): (
                MASK
                if isinstance(name, str) and isinstance(item, str) and is_assigned_credential(name, item)
                else redacted_in(item)
            )
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(redacted_in(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: redacted_in(getattr(value, each.name)) for each in fields(value)})
    return value
