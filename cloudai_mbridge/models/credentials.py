"""Credentials that can be recognised by their shape, in text that would be written to files.

Known shapes: user and password in a URL, an Authorization header, `NAME=value` where NAME is a credential's, tokens
with the prefix of a service, private keys and the like. A reference such as `$HF_TOKEN` is not a credential.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from cloudai_mbridge.models.references import REFERENCE

_SECRET_NAME = re.compile(
    r"token(?!iz|drop|s?_per)|secret|pass(w|phrase|$)|pwd|credential|(^|[_-])key|key(_?id)?[_\d]*$|(^|_)pat$",
    re.IGNORECASE,
)
# Keys of options and tables, where `label_key` and `pad_token` are not credentials
_CREDENTIAL_KEY = re.compile(
    r"api_?key|secret|passw|credential|^token$"
    r"|(wandb|hf|hub|access|account|auth|bearer|refresh|private|security|session)_?(key|token)$",
    re.IGNORECASE,
)
# Prefixes and lengths as the services document them
TOKEN = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    r"hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|nvapi-[A-Za-z0-9_-]{20,}"  # NVIDIA NGC
    r"|wandb_v1_[A-Za-z0-9_]{20,}"  # Weights & Biases
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{20,}"  # GitHub, GitLab
    r"|A(?:KIA|SIA)[A-Z0-9]{16}(?![A-Za-z0-9])|AIza[A-Za-z0-9_-]{35}"  # AWS, Google
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|sk-[A-Za-z0-9_-]{20,}"  # Slack, OpenAI
    r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{2,}\.[A-Za-z0-9_-]*"  # a JSON web token
    r")"
)
_OTHER = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"
    r"|\bmachine\s{1,3}\S{1,200}\s{1,3}login\s{1,3}\S{1,200}\s{1,3}password\s{1,3}\S"  # ~/.netrc
    r"|(?<!\S)(?:-u|--user|--proxy-user)[ =]?(?!\d+:\d+\b)[^\s:/$]{1,64}:[^\s/$]"  # curl
    r"|\b[Bb]asic\s{1,3}[A-Za-z0-9+/]{8,200}={1,2}"
    r"|https://hooks\.slack\.com/services/\w"
    r"|[?&](?:sig|signature|X-Amz-Signature)=[^&\s]{16}"  # signed URLs
    r"|(?<![A-Za-z0-9_])[A-Z][A-Z0-9_]{0,40}(?:KEY|TOKEN|SECRET|PASSWORD)\s{1,3}[A-Za-z0-9_+/=-]{20}"
)
BEARER = re.compile(
    r"""(?i)(\bauthorization["']?\s{0,3}[:=]\s{0,3}["']?(?:bearer|basic|token)\s{1,3}"""
    r"""|\bbearer\s{1,3}(?=\S{0,200}\d|\S{20}))([^\s"']+)"""
)
_PASSWORD_IN_URL = re.compile(r"""://[^\s/:@"'<>]*:(?!\d*/)([^\s@"'<>]+)@(?!sha\d+:)""")
_USER_IN_URL = re.compile(r"""\bhttps?://([^\s/:@"'<>]+)@""", re.IGNORECASE)
_PASSWORD_WITHOUT_SCHEME = re.compile(r"[^\s/@:]+:([^\s/@]+)@(?!sha\d+:)[A-Za-z0-9.-]+(?::\d+)?/?")
_HEADER = re.compile(
    r"""(?i)\b(x-[a-z-]{0,30}(?:key|token|secret)|(?:private|job|deploy|auth)-token|api-?key)\s{0,3}:\s{0,3}([^\s"']+)"""
)
_ASSIGNED = re.compile(
    r"""(?<![A-Za-z0-9_$-])-{0,2}([A-Za-z_][A-Za-z0-9_-]{1,63})(["']\s{0,3}:|["']?\s{0,3}=|:)\s{0,3}"""
    r"""("[^"]{0,200}"?|'[^']{0,200}'?|[^\s,;&"'}]{1,200})"""
)
_NO_VALUE = re.compile(rf"(?i)|0|1|true|false|yes|no|on|off|none|null|\*+|(?:{REFERENCE})+")
_SLURM_VARIABLE = re.compile(r"S(BATCH|RUN|ALLOC|LURM)_")

_IN_ENVIRONMENT = "a variable of extra_env_vars or global_env_vars, which travels in the environment only"


@dataclass(frozen=True)
class Credential:
    """What was recognised, without its value, and what to do instead."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"holds a credential ({self.what}), which would be written to files; {self.remedy}"


def is_secret(name: str) -> bool:
    """Return whether a key or variable of this name may hold a credential."""
    return bool(_SECRET_NAME.search(name))


def is_credential_key(key: str) -> bool:
    """Return whether an option or a key of a table has a credential's name."""
    return bool(_CREDENTIAL_KEY.search(key.strip("-").replace("-", "_")))


def is_secret_variable(name: str, value: object) -> bool:
    """Return whether a variable holds a credential, by its name or by the shape of its value."""
    return is_secret(name) or (isinstance(value, str) and find_credential(value) is not None)


@lru_cache(maxsize=4096)  # the points of a sweep share nearly all of their texts
def find_credential(text: str) -> Credential | None:
    """Return the first credential that a text holds."""
    return next(_credentials(text), None)


def find_credential_in_words(text: str) -> Credential | None:
    """Return the first credential of a command line, where an option may stand before its value: `--password x`."""
    words = shlex.split(text)
    options = [f"{option}={value}" for option, value in pairwise(words) if option.startswith("--")]
    return next((found for each in (text, *words, *options) if (found := find_credential(each))), None)


def slurm_variable_problem(name: str, value: object) -> str | None:
    """Return why a variable that Slurm's commands read cannot hold a credential: it would change the submission."""
    if not _SLURM_VARIABLE.match(name) or is_secret(name) or not isinstance(value, str):
        return None
    found = find_credential(value)
    return None if found is None else str(found)


def _credentials(text: str) -> Iterator[Credential]:
    if any(_is_value(match[1]) for match in _passwords(text)):
        yield Credential(
            "user or password in a URL",
            "remove what stands before the @ and use ~/.netrc, a git credential helper or enroot's .credentials,"
            f" or put the URL into {_IN_ENVIRONMENT}",
        )
    if any(_is_value(match[2]) for match in (*BEARER.finditer(text), *_HEADER.finditer(text))):
        yield Credential("an authorization header", f"put it into {_IN_ENVIRONMENT}")
    for name in _assigned(text):
        remedy = f"set {name} in extra_env_vars or global_env_vars, which travel in the environment only"
        yield Credential(f"{name}=...", remedy if name.isupper() else f"put it into {_IN_ENVIRONMENT}")
    if TOKEN.search(text) or _OTHER.search(text):
        yield Credential("a token or private key", f"put it into {_IN_ENVIRONMENT}")


def _passwords(text: str) -> Iterator[re.Match[str]]:
    yield from _PASSWORD_IN_URL.finditer(text)
    yield from _USER_IN_URL.finditer(text)
    if whole := _PASSWORD_WITHOUT_SCHEME.fullmatch(text.strip()):
        yield whole


def _assigned(text: str) -> Iterator[str]:
    """Yield the credentials' names that a text assigns values to."""
    position = 0
    while match := _ASSIGNED.search(text, position):
        name, sign, value = match.groups()
        position = match.start(3)  # the value may hold an assignment itself: --export=ALL,HF_TOKEN=x
        is_variable = name.isupper() and is_secret(name) and not name.endswith("TOKENS")
        is_key = sign != ":" and is_credential_key(name)
        if (is_variable or is_key) and _is_value(value.strip("\"'")):
            yield name


def _is_value(text: str) -> bool:
    """Return whether a text is a value of its own: not a switch, not a reference to a variable."""
    return not _NO_VALUE.fullmatch(text)
