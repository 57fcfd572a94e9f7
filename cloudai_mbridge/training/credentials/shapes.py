"""The shapes of credentials, as patterns. If a pattern has a group, the group is the credential.

A false refusal is as bad as a leak: a name that a user chose, the path of a file and a reference to a variable are
not credentials.
"""

import re

_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
REFERENCE = rf"\$(?:{_VARIABLE}|\{{{_VARIABLE}\}})"  # to a variable

# ---- names

SECRET_NAME = re.compile(
    r"token(?!iz|drop|s?_per)|secret|pass(w|phrase|$)|pwd|credential|(^|[_-])key|key(_?id)?[_\d]*$|(^|_)pat$"
    r"|(^|_)auth(_config|_json|orization)?$",
    re.IGNORECASE,
)
# Keys of options and tables; `label_key` and `pad_token` are not credentials there
CREDENTIAL_KEY = re.compile(
    r"api_?key|secret|passw|credential|^token$"
    r"|(wandb|hf|hub|access|account|auth|bearer|refresh|private|security|session)_?(key|token)$",
    re.IGNORECASE,
)
# With such a word, but another meaning: the location of a credential, a number, a special token, a column
OTHER_NAME = re.compile(
    r"(?:^|_)(?:key|pass)?(?:file|filename|path|dir|directory|env|var|variable|name|ur[il]|header|type|mode|timeout)$"
    r"|(?:^|_)(?:len|length|count|limit|budget|size|rate|ratio|dim|index|idx|dispatcher)$|tokens?_per_"
    r"|(?:^|_)(?:pad|eos|bos|eod|sep|cls|mask|unk|stop|start|end|next|special|image|audio|video)_tokens?(?:_ids?)?$"
    r"|(?:^|_)(?:primary|foreign|sort|cache|partition|group|label|text|data|json|image|public)_keys?$",
    re.IGNORECASE,
)
PASSWORD_NAME = re.compile(r"pass|pwd|secret", re.IGNORECASE)

# ---- values

# One value, as narrow as it may be, and everything that may belong to it
VALUE = re.compile(
    r"""\\{0,3}"[^"]{0,200}"?|\\{0,3}'[^']{0,200}'?|<[^<>\n]{0,60}>|(?:\$\{[^\s{}]{1,100}\}|[^\s,;&"'}]){1,200}"""
)
WHOLE_VALUE = re.compile(r"""\\{0,3}"[^"]*"?|\\{0,3}'[^']*'?|<[^<>\n]{0,60}>|\S+""")
# Switches, references with or without a default, and placeholders such as <pad>, [MASK] and <your token>
NO_VALUE = re.compile(
    rf"(?i)|0|1|true|false|yes|no|on|off|none|null|[*.?=+-]+|(?:{REFERENCE}|\$\{{[A-Za-z_][A-Za-z0-9_]*:?[-=?+]\}})+"
    r"|<[^<>]{0,60}>|\[[a-z_]{1,30}\]"
)
NUMBER = re.compile(r"\d{1,9}|\d{0,9}\.\d{1,9}(?:e[+-]?\d{1,3})?", re.IGNORECASE)
# A typical path. Secrets in base64, too, may begin with a slash, but have capitals
PATH = re.compile(
    rf"(?:~|\.\.?|{REFERENCE})?/[a-z0-9._/-]*|(?:~|{REFERENCE})/\S*|/\S+\.(?:json|key|pem|txt|ya?ml|toml)"
)
# Words in messages after the name of a credential and a colon
WORD_OF_A_MESSAGE = re.compile(
    r"(?i)(?:not|un|in)?(?:set|known|found|valid|authorized|missing|expired|denied|rejected|required|optional|empty|absent"
    r"|available|correct|wrong|failed|ok|found|redacted|hidden|provided|given|str|string|int|bool|ignored)[.!?]?"
)

# ---- assignments

NAME = re.compile(
    r"""(?<![A-Za-z0-9_$-])(-{0,2})([A-Za-z_][A-Za-z0-9_-]{1,63})"""
    r"""(\\{0,3}["']\s{0,3}:|(?:\\{0,3}["'])?\s{0,3}=|:)(\s{0,3})"""
)
# Also before the next name of a table in one line: {api_key: x, user: y}
LAST_OF_A_LINE = re.compile(r"""[ \t]{0,8}(?:[]}#]|,\s{0,3}["']?[A-Za-z_-]{1,64}["']?:|$)""", re.MULTILINE)

# ---- addresses

# Of a host that has a domain or a port; `run:7@team` and `image:tag@site` are a user's words
HOST = r"(?:(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z][A-Za-z0-9-]{1,62}|(?:\d{1,3}\.){3}\d{1,3}|[A-Za-z0-9-]{1,63}(?=:\d))"
PASSWORD_IN_URL = re.compile(r"""(?<=//)[^\s/:@"'<>]*:(?!\d*/)([^\s@"'<>]{1,1000})(?=@(?!sha\d+:))""")
USER_IN_URL = re.compile(r"""\bhttps?://([^\s/:@"'<>]+)@""", re.IGNORECASE)
PASSWORD_WITHOUT_SCHEME = re.compile(
    rf"(?!mailto:|\d+:)([^\s/@:,=]+:[^\s/@,]+)@(?!sha\d+:){HOST}(?::\d+)?/?", re.IGNORECASE
)
# Under the name of an address
PASSWORD_OF_AN_ADDRESS = re.compile(
    r"""(?<![A-Za-z0-9])(?:proxy|ur[il]|server|remote|endpoint|registry|mirror)["']?\s{0,3}=\s{0,3}["']?"""
    r"""([^\s/@:,="']{1,64}:[^\s/@,"']{1,200})@(?!sha\d+:)(?=[A-Za-z0-9])""",
    re.IGNORECASE,
)

# ---- headers and tokens

BEARER = re.compile(
    r"""(?i)(?:\bauthorization["']?\s{0,3}[:=]\s{0,3}["']?(?:bearer|basic|token)\s{1,3}"""
    r"""|\bbearer\s{1,3}(?=\S{0,200}\d|\S{20}))([^\s"']+)"""
)
HEADER = re.compile(
    r"""(?i)\b(?:x-[a-z-]{0,30}(?:key|token|secret)|(?:private|job|deploy|auth)-token|api-?key)"""
    r"""["']?\s{0,3}:\s{0,3}["']?([^\s"']+)"""
)
# Prefixes, alphabets and lengths as the services document them
_RANDOM = r"(?=[A-Za-z0-9_-]{0,200}[A-Za-z0-9]{16})"  # no words with hyphens between them
_MIXED = r"(?=[a-z0-9_-]{0,60}[A-Z])(?=[A-Z0-9_-]{0,60}[a-z])(?=[A-Za-z_-]{0,60}\d)"
TOKEN = re.compile(
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
OTHER = re.compile(
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
