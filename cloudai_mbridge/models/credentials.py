"""Credentials that can be recognised by their shape, in text that would be written to files.

Known shapes: user and password in a URL, an Authorization header, `NAME=value` where NAME is a credential's, tokens
with the prefix of a service, private keys and the like. A reference such as `$HF_TOKEN` is not a credential.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

from cloudai_mbridge.errors import shown
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
_TOKEN = re.compile(
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
# Where a shape has a group, the group is the credential
_OTHER = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)"
    r"|\bmachine\s{1,3}\S{1,200}\s{1,3}login\s{1,3}\S{1,200}\s{1,3}password\s{1,3}(\S+)"  # ~/.netrc
    r"|(?<!\S)(?:-u|--user|--proxy-user)[ =]?(?!\d+:\d+\b)(?!-)([^\s:/$=]{1,64}:[^\s/$]\S*)"  # curl
    r"|\b[Bb]asic\s{1,3}([A-Za-z0-9+/]{8,200}={1,2})"
    r"|https://hooks\.slack\.com/services/(\w[^\s\"'<>]*)"
    r"|[?&](?:sig|signature|X-Amz-Signature)=([^&\s]{16,})"  # signed URLs
    r"|(?<![A-Za-z0-9_])[A-Z][A-Z0-9_]{0,40}(?:KEY|TOKEN|SECRET|PASSWORD)\s{1,3}([A-Za-z0-9_+/=-]{20,})"
)
_BEARER = re.compile(
    r"""(?i)(?:\bauthorization["']?\s{0,3}[:=]\s{0,3}["']?(?:bearer|basic|token)\s{1,3}"""
    r"""|\bbearer\s{1,3}(?=\S{0,200}\d|\S{20}))([^\s"']+)"""
)
_HEADER = re.compile(
    r"""(?i)\b(?:x-[a-z-]{0,30}(?:key|token|secret)|(?:private|job|deploy|auth)-token|api-?key)"""
    r"""["']?\s{0,3}:\s{0,3}["']?([^\s"']+)"""
)
_PASSWORD_IN_URL = re.compile(r"""(?<=://)[^\s/:@"'<>]*:(?!\d*/)([^\s@"'<>]{1,1000})(?=@(?!sha\d+:))""")
_USER_IN_URL = re.compile(r"""\bhttps?://([^\s/:@"'<>]+)@""", re.IGNORECASE)
# The last part is a host, and not the time before a signal: --signal=B:USR1@60
_PASSWORD_WITHOUT_SCHEME = re.compile(r"([^\s/@:]+:[^\s/@]+)@(?!sha\d+:|\d+\Z)[A-Za-z0-9.-]+(?::\d+)?/?")
_NAME = re.compile(
    r"""(?<![A-Za-z0-9_$-])-{0,2}([A-Za-z_][A-Za-z0-9_-]{1,63})"""
    r"""(\\{0,3}["']\s{0,3}:|(?:\\{0,3}["'])?\s{0,3}=|:)\s{0,3}"""
)
# One value, as narrow as it may be, and everything that may belong to it
_VALUE = re.compile(r"""\\{0,3}"[^"]{0,200}"?|\\{0,3}'[^']{0,200}'?|[^\s,;&"'}]{1,200}""")
_WHOLE_VALUE = re.compile(r"""\\{0,3}"[^"]*"?|\\{0,3}'[^']*'?|\S+""")
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


_PASSWORD = Credential(
    "user or password in a URL",
    "remove what stands before the @ and use ~/.netrc, a git credential helper or enroot's .credentials,"
    f" or put the URL into {_IN_ENVIRONMENT}",
)
_AUTHORIZATION = Credential("an authorization header", f"put it into {_IN_ENVIRONMENT}")
_TOKEN_OR_KEY = Credential("a token or private key", f"put it into {_IN_ENVIRONMENT}")


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
    return next((credential for credential, _ in _credentials(text)), None)


def credential_spans(text: str) -> list[tuple[int, int]]:
    """Return where in a text the credentials stand that `find_credential` would find, in order; they may overlap."""
    return sorted(span for _, span in _credentials(text))


def find_credential_in_words(text: str) -> Credential | None:
    """Return the first credential of a command line, where an option may stand before its value: `--password x`."""
    words = shlex.split(text)
    options = [f"{option}={value}" for option, value in pairwise(words) if option.startswith("--")]
    return next((found for each in (text, *words, *options) if (found := find_credential(each))), None)


def shown_key(key: str) -> str:
    """Return a key for a message: without the value that CloudAI lets stand in it, *** if it holds a credential."""
    name = key.partition("=")[0]
    return "***" if any(start < len(name) for start, _ in credential_spans(key)) else name


def shown_value(value: object) -> str:
    """Return a value for a message, unless it holds a credential."""
    return "(value hidden)" if find_credential(repr(value)) else shown(value)


def slurm_variable_problem(name: str, value: object) -> str | None:
    """Return why a variable that Slurm's commands read cannot hold a credential: it would change the submission."""
    if not _SLURM_VARIABLE.match(name) or is_secret(name) or not isinstance(value, str):
        return None
    found = find_credential(value)
    return None if found is None else str(found)


def is_assigned_credential(name: str, value: str) -> bool:
    """Return whether a value that stands under a name is a credential."""
    is_variable = name.isupper() and is_secret(name) and not name.endswith("TOKENS")
    return (is_variable or is_credential_key(name)) and _is_value(value)


def _credentials(text: str) -> Iterator[tuple[Credential, tuple[int, int]]]:
    """Yield every credential and where it stands."""
    yield from ((_PASSWORD, span) for span in _passwords(text))
    for match in chain(_BEARER.finditer(text), _HEADER.finditer(text)):
        if _is_value(match[1]):
            yield _AUTHORIZATION, match.span(1)
    yield from _assigned(text)
    for match in chain(_TOKEN.finditer(text), _OTHER.finditer(text)):
        if _is_value(match[match.lastindex or 0]):
            yield _TOKEN_OR_KEY, match.span(match.lastindex or 0)


def _passwords(text: str) -> Iterator[tuple[int, int]]:
    """Yield where users and passwords of URLs stand."""
    yield from (match.span() for match in _PASSWORD_IN_URL.finditer(text) if _is_value(match[1]))
    yield from (match.span(1) for match in _USER_IN_URL.finditer(text) if _is_value(match[1]))
    whole = _PASSWORD_WITHOUT_SCHEME.fullmatch(text.strip())
    if whole and _is_value(whole[1].partition(":")[2]):
        start = text.index(whole[1])
        yield start, start + len(whole[1])


def _assigned(text: str) -> Iterator[tuple[Credential, tuple[int, int]]]:
    """Yield the credentials that a text assigns to names."""
    position = 0
    while match := _NAME.search(text, position):
        name, sign = match.groups()
        position = match.end()  # the value may hold an assignment itself: --export=ALL,HF_TOKEN=x
        value = _VALUE.match(text, position)
        is_name = sign != ":" or name.isupper()
        if not (value and is_name and is_assigned_credential(name, value[0].strip("\"'\\"))):
            continue
        if whole := _WHOLE_VALUE.match(text, position):
            position = whole.end()
            remedy = f"set {name} in extra_env_vars or global_env_vars, which travel in the environment only"
            yield (
                Credential(f"{name}=...", remedy if name.isupper() else f"put it into {_IN_ENVIRONMENT}"),
                whole.span(),
            )


def _is_value(text: str) -> bool:
    """Return whether a text is a value of its own: not a switch, not a reference to a variable."""
    return not _NO_VALUE.fullmatch(text)
