"""Find credentials in text by their shape: standalone shapes are in `shapes`, shapes after a name are here."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain

from cloudai_mbridge.training.credentials import shapes

SHORT_OPTIONS = {"-hf": "--hf_token", "-wdk": "--wandb_key"}  # of Megatron-Bridge's launcher


class CredentialKind(Enum):
    """Evidence of a credential."""

    PASSWORD = auto()
    AUTHORIZATION = auto()
    ASSIGNED = auto()
    TOKEN_OR_KEY = auto()


@dataclass(frozen=True)
class FoundCredential:
    """A credential in a text, as [start, end). name: the key or variable it is assigned to, if any."""

    kind: CredentialKind
    span: tuple[int, int]
    name: str = ""


def is_secret(name: str) -> bool:
    """Return whether a key or variable of this name may hold a credential."""
    return bool(shapes.SECRET_NAME.search(name))


def is_credential_key(key: str) -> bool:
    """Return whether an option or a key of a table has a credential's name."""
    name = key.strip("-").replace("-", "_")
    return bool(shapes.CREDENTIAL_KEY.search(name)) and not shapes.OTHER_NAME.search(name)


def credential_spans(text: str) -> list[tuple[int, int]]:
    """Return the spans of the credentials in a text, in order; they may overlap."""
    return sorted(found.span for found in credentials_in(text))


def is_assigned_credential(name: str, value: str) -> bool:
    """Return whether a value that stands under a name is a credential."""
    is_variable = name.isupper() and is_secret(name) and not name.endswith("TOKENS")
    if not (is_variable or is_credential_key(name)) or shapes.OTHER_NAME.search(name.replace("-", "_")):
        return False
    return _is_value(value) and not _is_of_another_kind(name, value)


def _is_of_another_kind(name: str, value: str) -> bool:
    """Return whether a value is the path of a file, or a number under a name such as NUM_TOKEN."""
    is_password = bool(shapes.PASSWORD_NAME.search(name))
    if shapes.PATH.fullmatch(value):
        return value.count("/") > is_password
    return bool(shapes.NUMBER.fullmatch(value)) and not is_password and not is_credential_key(name)


def credentials_in(text: str) -> Iterator[FoundCredential]:
    """Yield every credential of a text."""
    yield from (FoundCredential(CredentialKind.PASSWORD, span) for span in _passwords(text))
    for match in chain(shapes.BEARER.finditer(text), shapes.HEADER.finditer(text)):
        if _is_value(match[1]):
            yield FoundCredential(CredentialKind.AUTHORIZATION, match.span(1))
    yield from _assigned(text)
    for match in chain(shapes.TOKEN.finditer(text), shapes.OTHER.finditer(text)):
        group = match.lastindex or 0
        if _is_value(match[group]):
            yield FoundCredential(CredentialKind.TOKEN_OR_KEY, match.span(group))


def _passwords(text: str) -> Iterator[tuple[int, int]]:
    yield from (match.span() for match in shapes.PASSWORD_IN_URL.finditer(text) if _is_value(match[1]))
    yield from (match.span(1) for match in shapes.USER_IN_URL.finditer(text) if _is_value(match[1]))
    yield from (match.span(1) for match in shapes.PASSWORD_OF_AN_ADDRESS.finditer(text) if _is_login(match[1]))
    whole = shapes.PASSWORD_WITHOUT_SCHEME.fullmatch(text.strip())
    if whole and _is_login(whole[1]):
        start = text.index(whole[1])
        yield start, start + len(whole[1])


def _is_login(text: str) -> bool:
    """Return whether user:password has a password."""
    return _is_value(text.partition(":")[2])


def _assigned(text: str) -> Iterator[FoundCredential]:
    position = 0
    while match := shapes.NAME.search(text, position):
        name, position = match[2], match.end()  # the value may hold an assignment itself: --export=ALL,HF_TOKEN=x
        value = shapes.VALUE.match(text, position)
        if not (value and is_assigned_credential(name, value[0].strip("\"'\\")) and _is_assignment(match, value)):
            continue
        if whole := shapes.WHOLE_VALUE.match(text, position):
            position = whole.end()
            yield FoundCredential(CredentialKind.ASSIGNED, whole.span(), name)


def _is_assignment(name: re.Match[str], value: re.Match[str]) -> bool:
    """Return whether `name: value` assigns, as in YAML; in `--password: try again` and `my-token: missing` it does not.

    With `=`, with quotes around the name, and in capitals it always does.
    """
    dashes, word, sign, blank = name.groups()
    if sign != ":" or word.isupper():
        return True
    if dashes or not blank or "\n" in blank or word.lower() == "token":
        return False
    is_last = shapes.LAST_OF_A_LINE.match(value.string, value.end())
    return bool(is_last or any(map(str.isdigit, value[0]))) and not shapes.WORD_OF_A_MESSAGE.fullmatch(value[0])


def _is_value(text: str) -> bool:
    """Return whether a text is a value of its own: not a switch, not a reference to a variable."""
    return not shapes.NO_VALUE.fullmatch(text)
