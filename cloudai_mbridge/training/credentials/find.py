"""Find credentials in text by their shape. If a pattern has a group, the group is the credential.

A false refusal is as bad as a leak: a name that a user chose, the path of a file and a reference to a variable are
not credentials.
"""

import re
from collections.abc import Iterator
from itertools import chain

SHORT_OPTIONS = {"-hf": "--hf_token", "-wdk": "--wandb_key"}  # of Megatron-Bridge's launcher

_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
REFERENCE = rf"\$(?:{_VARIABLE}|\{{{_VARIABLE}\}})"  # to a variable

# ---- names

_SECRET_NAME = re.compile(
    r"token(?!iz|drop|s?_per)|secret|pass(w|phrase|$)|pwd|credential|(^|[_-])key|key(_?id)?[_\d]*$|(^|_)pat$"
    r"|(^|_)auth(_config|_json|orization)?$",
    re.IGNORECASE,
)
# Keys of options and tables; `label_key` and `pad_token` are not credentials there
_CREDENTIAL_KEY = re.compile(
    r"api_?key|secret|passw|credential|^token$"
    r"|(wandb|hf|hub|access|account|auth|bearer|refresh|private|security|session)_?(key|token)$",
    re.IGNORECASE,
)
# With such a word, but another meaning: the location of a credential, a number, a special token, a column
_OTHER_NAME = re.compile(
    r"(?:^|_)(?:key|pass)?(?:file|filename|path|dir|directory|env|var|variable|name|ur[il]|header|type|mode|timeout)$"
    r"|(?:^|_)(?:len|length|count|limit|budget|size|rate|ratio|dim|index|idx|dispatcher)$|tokens?_per_"
    r"|(?:^|_)(?:pad|eos|bos|eod|sep|cls|mask|unk|stop|start|end|next|special|image|audio|video)_tokens?(?:_ids?)?$"
    r"|(?:^|_)(?:primary|foreign|sort|cache|partition|group|label|text|data|json|image|public)_keys?$",
    re.IGNORECASE,
)
_DIRECTORIES = ("PWD", "OLDPWD")  # of the shell
_PASSWORD_NAME = re.compile(r"pass|pwd|secret", re.IGNORECASE)

# ---- values

# One value, as narrow as it may be, and everything that may belong to it
_VALUE = re.compile(
    r"""\\{0,3}"[^"]{0,200}"?|\\{0,3}'[^']{0,200}'?|<[^<>\n]{0,60}>|(?:\$\{[^\s{}]{1,100}\}|[^\s,;&"'}]){1,200}"""
)
_WHOLE_VALUE = re.compile(r"""\\{0,3}"[^"]*"?|\\{0,3}'[^']*'?|<[^<>\n]{0,60}>|\S+""")
# Switches, references with or without a default, and placeholders such as <pad>, [MASK] and <your token>
_NO_VALUE = re.compile(
    rf"(?i)|0|1|true|false|yes|no|on|off|none|null|[*.?=+-]+|(?:{REFERENCE}|\$\{{[A-Za-z_][A-Za-z0-9_]*:?[-=?+]\}})+"
    r"|<[^<>]{0,60}>|\[[a-z_]{1,30}\]"
)
_NUMBER = re.compile(r"\d{1,9}|\d{0,9}\.\d{1,9}(?:e[+-]?\d{1,3})?", re.IGNORECASE)
# A typical path. Secrets in base64, too, may begin with a slash, but have capitals
_PATH = re.compile(
    rf"(?:~|\.\.?|{REFERENCE})?/[a-z0-9._/-]*|(?:~|{REFERENCE})/\S*|/\S+\.(?:json|key|pem|txt|ya?ml|toml)"
)
# Words in messages after the name of a credential and a colon
_WORD_OF_A_MESSAGE = re.compile(
    r"(?i)(?:not|un|in)?(?:set|known|found|valid|authorized|missing|expired|denied|rejected|required|optional|empty|absent"
    r"|available|correct|wrong|failed|ok|found|redacted|hidden|provided|given|str|string|int|bool|ignored)[.!?]?"
)

# ---- assignments

_NAME = re.compile(
    r"""(?<![A-Za-z0-9_$-])(-{0,2})([A-Za-z_][A-Za-z0-9_-]{1,63})"""
    r"""(\\{0,3}["']\s{0,3}:|(?:\\{0,3}["'])?\s{0,3}=|:)(\s{0,3})"""
)
# Also before the next name of a table in one line: {api_key: x, user: y}
_LAST_OF_A_LINE = re.compile(r"""[ \t]{0,8}(?:[]}#]|,\s{0,3}["']?[A-Za-z_-]{1,64}["']?:|$)""", re.MULTILINE)

# ---- addresses

# Of a host that has a domain or a port; `run:7@team` and `image:tag@site` are a user's words
HOST = r"(?:(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z][A-Za-z0-9-]{1,62}|(?:\d{1,3}\.){3}\d{1,3}|[A-Za-z0-9-]{1,63}(?=:\d))"
_PASSWORD_IN_URL = re.compile(r"""(?<=//)[^\s/:@"'<>]*:(?!\d*/)([^\s@"'<>]{1,1000})(?=@(?!sha\d+:))""")
_USER_IN_URL = re.compile(r"""\bhttps?://([^\s/:@"'<>]+)@""", re.IGNORECASE)
_PASSWORD_WITHOUT_SCHEME = re.compile(
    rf"(?!mailto:|\d+:)([^\s/@:,=]+:[^\s/@,]+)@(?!sha\d+:){HOST}(?::\d+)?/?", re.IGNORECASE
)
# Under the name of an address
_PASSWORD_OF_AN_ADDRESS = re.compile(
    r"""(?<![A-Za-z0-9])(?:proxy|ur[il]|server|remote|endpoint|registry|mirror)["']?\s{0,3}=\s{0,3}["']?"""
    r"""([^\s/@:,="']{1,64}:[^\s/@,"']{1,200})@(?!sha\d+:)(?=[A-Za-z0-9])""",
    re.IGNORECASE,
)

# ---- headers and tokens

_BEARER = re.compile(
    r"""(?i)(?:\bauthorization["']?\s{0,3}[:=]\s{0,3}["']?(?:bearer|basic|token)\s{1,3}"""
    r"""|\bbearer\s{1,3}(?=\S{0,200}\d|\S{20}))([^\s"']+)"""
)
_HEADER = re.compile(
    r"""(?i)\b(?:x-[a-z-]{0,30}(?:key|token|secret)|(?:private|job|deploy|auth)-token|api-?key)"""
    r"""["']?\s{0,3}:\s{0,3}["']?([^\s"']+)"""
)
# Prefixes, alphabets and lengths as the services document them
_RANDOM = r"(?=[A-Za-z0-9_-]{0,200}[A-Za-z0-9]{16})"  # no words with hyphens between them
_MIXED = r"(?=[a-z0-9_-]{0,60}[A-Z])(?=[A-Z0-9_-]{0,60}[a-z])(?=[A-Za-z_-]{0,60}\d)"
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    r"(?:hf|api_org)_[A-Za-z0-9]{30,}"  # Hugging Face
    rf"|nvapi-{_RANDOM}[A-Za-z0-9_-]{{32,}}"  # NVIDIA NGC
    r"|wandb_v1_[A-Za-z0-9_]{20,}"  # Weights & Biases
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{20,}|gl(?:pat|dt|rt|cbt|ptt|ft)-[A-Za-z0-9_-]{20,}"  # GitHub
    r"|A(?:KIA|SIA)[A-Z0-9]{16}(?![A-Za-z0-9])|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,}"  # AWS, Google
    rf"|xox[abeoprs]-[A-Za-z0-9-]{{10,}}|(?<!-)sk-{_RANDOM}(?:[A-Za-z0-9_-]{{32,}}|{_MIXED}[A-Za-z0-9_-]{{20,}})"
    r"|pypi-AgE[A-Za-z0-9_-]{30,}|npm_[A-Za-z0-9]{36}(?![A-Za-z0-9_])|do[opr]_v1_[a-f0-9]{64}"  # registries
    r"|dckr_pat_[A-Za-z0-9_-]{20,}|hvs\.[A-Za-z0-9_-]{24,}|dapi[a-f0-9]{32}(?![a-z0-9])|gsk_[A-Za-z0-9]{40,}"
    r"|[sr]k_(?:live|test)_[A-Za-z0-9]{20,}|SG\.[A-Za-z0-9_-]{20,}\.[A-Za-z0-9_-]{20,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{2,}\.[A-Za-z0-9_-]*"  # a JSON web token
    r")"
)
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)")
_OTHER = re.compile(
    PRIVATE_KEY.pattern
    + r"|\bmachine\s{1,3}\S{1,200}\s{1,3}login\s{1,3}\S{1,200}\s{1,3}password\s{1,3}(\S+)"  # ~/.netrc
    # `--user alice:users` of other programs is a user and a group
    r"|\bcurl\s(?:[^\n|;&]{0,300}?\s)?(?:-[A-Za-z]{0,8}u|--user)[ =]?[\"']?(?![-\"'])([^\s:/$=]{1,64}:[^\s/$]\S*)"
    r"|(?<!\S)--proxy-user[ =](?!-)([^\s:/$=]{1,64}:[^\s/$]\S*)"
    r"|\bsshpass\s{1,3}-p\s?([^\s$]\S*)"
    r"|\b(?:docker|podman|helm registry)\s{1,3}login\s(?:[^\n|;&]{0,200}?\s)?-p\s([^\s$-]\S*)"
    r"|\bwandb\s{1,3}login\s(?:--\S{1,40}\s{1,3}){0,3}([A-Za-z0-9_]{40,})"
    r"|\b(?:mysql|mysqldump|mysqladmin|mariadb)\s(?:[^\n|;&]{0,200}?\s)?-p([^\s$-]\S*)"
    r"|(?<!\S)--(?:password|passwd|token|secret|api-key)\s{1,3}(?=\S{0,200}[\d!@#%^&*+])([^\s$\"'<-][^\s$]{3,})"
    r"|\b[Bb]asic\s{1,3}([A-Za-z0-9+/]{8,200}={1,2})"
    r"|\A[Bb]asic\s{1,3}(?=[^\s=]{0,200}\d)(?=[^\s=]{0,200}[A-Z])([A-Za-z0-9+/]{12,200})\s*\Z"
    r"|[\"']_?auth\\{0,3}[\"']\s{0,3}:\s{0,3}\\{0,3}[\"'](?=[^\"']*[A-Z])(?=[^\"']*[a-z])"
    r"([A-Za-z0-9+/]{12,}={0,2})\\{0,3}[\"']"  # of registries
    r"|https://hooks\.slack\.com/services/(\w[^\s\"'<>]*)"
    r"|[?&](?:sig|signature|X-Amz-Signature)=([^&\s]{16,})"  # signed URLs
    r"|(?<![A-Za-z0-9_])[A-Z][A-Z0-9_]{0,40}(?:KEY|TOKEN|SECRET|PASSWORD)\s{1,3}"
    r"((?=[A-Za-z_/-]{0,200}[0-9+=]|[A-Za-z]{20})[A-Za-z0-9_+/=-]{20,})"
)

# Shapes of credentials that need no name
IN_URL, IN_HEADER, ALONE = "user or password in a URL", "an authorization header", "a token or private key"


def is_secret(name: str) -> bool:
    """Return whether a key or variable of this name may hold a credential."""
    return bool(_SECRET_NAME.search(name))


def is_credential_key(key: str) -> bool:
    """Return whether an option or a key of a table has a credential's name."""
    name = key.strip("-").replace("-", "_")
    return bool(_CREDENTIAL_KEY.search(name)) and not _OTHER_NAME.search(name)


def credential_spans(text: str) -> list[tuple[int, int]]:
    """Return the spans of the credentials in a text, in order; they may overlap."""
    return sorted(span for _, span in credentials_in(text))


def is_assigned_credential(name: str, value: str) -> bool:
    """Return whether a value that stands under a name is a credential."""
    is_variable = name.isupper() and is_secret(name) and not name.endswith("TOKENS")
    if not (is_variable or is_credential_key(name)) or _OTHER_NAME.search(name.replace("-", "_")):
        return False
    if name in _DIRECTORIES and value.startswith("/"):
        return False
    return _is_value(value) and not _is_of_another_kind(name, value)


def _is_of_another_kind(name: str, value: str) -> bool:
    """Return whether a value is the path of a file, or a number under a name such as NUM_TOKEN."""
    is_password = bool(_PASSWORD_NAME.search(name))
    if _PATH.fullmatch(value):
        return value.count("/") > is_password
    return bool(_NUMBER.fullmatch(value)) and not is_password and not is_credential_key(name)


def credentials_in(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the shape of every credential of a text, or the name that it is assigned to; and its span."""
    yield from ((IN_URL, match.span()) for match in _PASSWORD_IN_URL.finditer(text) if _is_value(match[1]))
    yield from ((IN_URL, match.span(1)) for match in _USER_IN_URL.finditer(text) if _is_value(match[1]))
    yield from ((IN_URL, match.span(1)) for match in _PASSWORD_OF_AN_ADDRESS.finditer(text) if _is_login(match[1]))
    whole = _PASSWORD_WITHOUT_SCHEME.fullmatch(text.strip())
    if whole and _is_login(whole[1]):
        start = text.index(whole[1])
        yield IN_URL, (start, start + len(whole[1]))
    for match in chain(_BEARER.finditer(text), _HEADER.finditer(text)):
        if _is_value(match[1]):
            yield IN_HEADER, match.span(1)
    yield from _assigned(text)
    for match in chain(_TOKEN.finditer(text), _OTHER.finditer(text)):
        group = match.lastindex or 0
        if _is_value(match[group]):
            yield ALONE, match.span(group)


def _is_login(text: str) -> bool:
    """Return whether user:password has a password."""
    return _is_value(text.partition(":")[2])


def _assigned(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    position = 0
    while match := _NAME.search(text, position):
        name, position = match[2], match.end()  # the value may hold an assignment itself: --export=ALL,HF_TOKEN=x
        value = _VALUE.match(text, position)
        if not (value and is_assigned_credential(name, value[0].strip("\"'\\")) and _is_assignment(match, value)):
            continue
        if whole := _WHOLE_VALUE.match(text, position):
            position = whole.end()
            yield name, whole.span()


def _is_assignment(name: re.Match[str], value: re.Match[str]) -> bool:
    """Return whether `name: value` assigns, as in YAML; in `--password: try again` and `my-token: missing` it does not.

    With `=`, with quotes around the name, and in capitals it always does.
    """
    dashes, word, sign, blank = name.groups()
    if sign != ":" or word.isupper():
        return True
    if dashes or not blank or "\n" in blank or word.lower() == "token":
        return False
    is_last = _LAST_OF_A_LINE.match(value.string, value.end())
    return bool(is_last or any(map(str.isdigit, value[0]))) and not _WORD_OF_A_MESSAGE.fullmatch(value[0])


def _is_value(text: str) -> bool:
    """Return whether a text is a value of its own: not a switch, not a reference to a variable."""
    return not _NO_VALUE.fullmatch(text)
