"""Credentials that can be recognised by their shape, in text that would be written to files.

Known shapes: user and password in a URL, an Authorization header, `NAME=value` where NAME is a credential's, tokens
with the prefix of a service, private keys and the like. A reference such as `$HF_TOKEN` is not a credential.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

from cloudai_mbridge.errors import shown
from cloudai_mbridge.models.values import credential_shapes as shapes

_SLURM_VARIABLE = re.compile(r"S(BATCH|RUN|ALLOC|LURM)_")

SHORT_OPTIONS = {"-hf": "--hf_token", "-wdk": "--wandb_key"}  # of Megatron-Bridge's launcher

_IN_ENVIRONMENT = "a variable of extra_env_vars or global_env_vars, which travels in the environment only"


@dataclass(frozen=True)
class Credential:
    """What was recognised, without its value, and what to do instead."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"holds a credential ({self.what}), which would be written to files; {self.remedy}"


_PASSWORD = Credential(
    "user or password in a URL",
    "remove what stands before the @ and use ~/.netrc, a git credential helper or enroot's .credentials,"
    f" or put the URL into {_IN_ENVIRONMENT}",
)
_AUTHORIZATION = Credential("an authorization header", f"put it into {_IN_ENVIRONMENT}")
_TOKEN_OR_KEY = Credential("a token or private key", f"put it into {_IN_ENVIRONMENT}")


def is_secret(name: str) -> bool:
    """Return whether a key or variable of this name may hold a credential."""
    return bool(shapes.SECRET_NAME.search(name))


def is_credential_key(key: str) -> bool:
    """Return whether an option or a key of a table has a credential's name."""
    name = key.strip("-").replace("-", "_")
    return bool(shapes.CREDENTIAL_KEY.search(name)) and not shapes.OTHER_NAME.search(name)


def is_secret_variable(name: str, value: object) -> bool:
    """Return whether a variable holds a credential, by its name or by the shape of its value."""
    return is_secret(name) or (
        isinstance(value, str)
        and any(map(find_credential, (value, f"{name}={value}")))  # http_proxy=user:password@host
    )


@lru_cache(maxsize=4096)  # the points of a sweep share nearly all of their texts
def find_credential(text: str) -> Credential | None:
    """Return the first credential that a text holds."""
    return next((credential for credential, _ in _credentials(text)), None)


def credential_spans(text: str) -> list[tuple[int, int]]:
    """Return where in a text the credentials stand that `find_credential` would find, in order; they may overlap."""
    return sorted(span for _, span in _credentials(text))


def find_credential_in_words(text: str) -> Credential | None:
    """Return the first credential of a command line, where an option may stand before its value: `--password x`."""
    words = shlex.split(text)
    alone = [word for option, word in pairwise(["", *words]) if not _is_option(option)]
    return find_credential(text) or next(filter(None, map(find_credential, alone)), None) or find_in_arguments(words)


def find_in_arguments(words: Sequence[str]) -> Credential | None:
    """Return the first credential that stands after its option in a list of arguments."""
    pairs = [(option, word) for option, word in pairwise(words) if _is_option(option) and not word.startswith("--")]
    texts = [f"{SHORT_OPTIONS.get(option, option)}={word}" for option, word in pairs]
    return next(filter(None, map(find_credential, texts)), None)


def _is_option(word: str) -> bool:
    return (word.startswith("--") and "=" not in word) or word in SHORT_OPTIONS


def shown_key(key: str) -> str:
    """Return a key for a message: without the value that CloudAI lets stand in it, *** if it holds a credential."""
    name = key.partition("=")[0]
    return "***" if any(start < len(name) for start, _ in credential_spans(key)) else name


def shown_value(value: object) -> str:
    """Return a value for a message, unless it holds a credential."""
    return "(value hidden)" if find_credential(repr(value)) or holds_credential(value) else shown(value)


def holds_credential(value: object) -> bool:
    """Return whether a text, or a list of texts, holds a credential, maybe after its option."""
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    return any(map(find_credential, texts)) or any(map(find_in_arguments, (texts, *map(str.split, texts))))


def slurm_variable_problem(name: str, value: object) -> str | None:
    """Return why a variable that Slurm's commands read cannot hold a credential: it would change the submission."""
    if not _SLURM_VARIABLE.match(name) or is_secret(name) or not isinstance(value, str):
        return None
    found = find_credential(value)
    return None if found is None else str(found)


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


def _credentials(text: str) -> Iterator[tuple[Credential, tuple[int, int]]]:
    """Yield every credential and where it stands."""
    yield from ((_PASSWORD, span) for span in _passwords(text))
    for match in chain(shapes.BEARER.finditer(text), shapes.HEADER.finditer(text)):
        if _is_value(match[1]):
            yield _AUTHORIZATION, match.span(1)
    yield from _assigned(text)
    for match in chain(shapes.TOKEN.finditer(text), shapes.OTHER.finditer(text)):
        if _is_value(match[match.lastindex or 0]):
            yield _TOKEN_OR_KEY, match.span(match.lastindex or 0)


def _passwords(text: str) -> Iterator[tuple[int, int]]:
    """Yield where users and passwords of URLs stand."""
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


def _assigned(text: str) -> Iterator[tuple[Credential, tuple[int, int]]]:
    """Yield the credentials that a text assigns to names."""
    position = 0
    while match := shapes.NAME.search(text, position):
        name, position = match[2], match.end()  # the value may hold an assignment itself: --export=ALL,HF_TOKEN=x
        value = shapes.VALUE.match(text, position)
        if not (value and is_assigned_credential(name, value[0].strip("\"'\\")) and _is_assignment(match, value)):
            continue
        if whole := shapes.WHOLE_VALUE.match(text, position):
            position = whole.end()
            remedy = f"set {name} in extra_env_vars or global_env_vars, which travel in the environment only"
            yield (
                Credential(f"{name}=...", remedy if name.isupper() else f"put it into {_IN_ENVIRONMENT}"),
                whole.span(),
            )


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
