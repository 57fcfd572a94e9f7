"""Refuse credentials in text that would be written to files.

Known shapes: user and password in a URL, an Authorization header, `NAME=value` where NAME is a credential's, tokens
with the prefix of a service, private keys and the like. A reference such as `$HF_TOKEN` is not a credential.
"""

import re
import shlex
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from cloudai_mbridge.errors import shown
from cloudai_mbridge.training.credentials.find import (
    ALONE,
    IN_HEADER,
    IN_URL,
    SHORT_OPTIONS,
    credential_spans,
    credentials_in,
    is_secret,
)
from cloudai_mbridge.training.credentials.scrub import MASK

_SLURM_VARIABLE = re.compile(r"S(BATCH|RUN|ALLOC|LURM)_")

_IN_ENVIRONMENT = "a variable of extra_env_vars or global_env_vars, which travels in the environment only"


def is_secret_variable(name: str, value: object) -> bool:
    """Return whether a variable holds a credential, by its name or by the shape of its value."""
    return is_secret(name) or (
        isinstance(value, str)
        and any(map(find_credential, (value, f"{name}={value}")))  # http_proxy=user:password@host
    )


@lru_cache(maxsize=4096)  # the points of a sweep share nearly all of their texts
def find_credential(text: str) -> str | None:
    """Return a message about the first credential in a text, without its value; None without a credential."""
    what = next((what for what, _ in credentials_in(text)), None)
    if what is None:
        return None
    remedy = f"put it into {_IN_ENVIRONMENT}"
    if what == IN_URL:
        remedy = "remove the part before the @ and use ~/.netrc, a git credential helper or enroot's .credentials,"
        remedy += f" or put the URL into {_IN_ENVIRONMENT}"
    elif what not in (IN_HEADER, ALONE):
        if what.isupper():
            remedy = f"set {what} in extra_env_vars or global_env_vars, which travel in the environment only"
        what += "=..."
    return f"holds a credential ({what}), which would be written to files; {remedy}"


def find_credential_in_words(text: str) -> str | None:
    """Find a credential in a command line, with options separate from their values: `--password x`."""
    words = shlex.split(text)
    alone = [word for option, word in pairwise(["", *words]) if not _is_option(option)]
    return find_credential(text) or next(filter(None, map(find_credential, alone)), None) or find_in_arguments(words)


def find_in_arguments(words: Sequence[str]) -> str | None:
    """Find a credential in a list of arguments, among the arguments that follow their option."""
    pairs = [(option, word) for option, word in pairwise(words) if _is_option(option) and not word.startswith("--")]
    texts = [f"{SHORT_OPTIONS.get(option, option)}={word}" for option, word in pairs]
    return next(filter(None, map(find_credential, texts)), None)


def _is_option(word: str) -> bool:
    return (word.startswith("--") and "=" not in word) or word in SHORT_OPTIONS


def shown_key(key: str) -> str:
    """Return a key for a message: without the value that CloudAI allows in it, *** if it contains a credential."""
    name = key.partition("=")[0]
    return MASK if any(start < len(name) for start, _ in credential_spans(key)) else name


def shown_value(value: object) -> str:
    """Return a value for a message, unless it holds a credential."""
    return "(value hidden)" if find_credential(repr(value)) or holds_credential(value) else shown(value)


def holds_credential(value: object) -> bool:
    """Return whether a text, or a list of texts, contains a credential, possibly after its option."""
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    return any(map(find_credential, texts)) or any(map(find_in_arguments, (texts, *map(str.split, texts))))


def slurm_variable_problem(name: str, value: object) -> str | None:
    """Return why a variable that Slurm's commands read cannot hold a credential: it would change the submission."""
    if not _SLURM_VARIABLE.match(name) or is_secret(name) or not isinstance(value, str):
        return None
    return find_credential(value)
