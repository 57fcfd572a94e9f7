"""Text that is safe to show, and cut to a length."""

import re

# Controls except tab and line feed, lone surrogates, non-characters, and the marks that reorder text around them
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)
LONGEST = 2000


def visible(text: str) -> str:
    """Return the text with unprintable characters escaped, such as \\x1b. The result is valid in XML 1.0."""
    return _INVISIBLE.sub(lambda match: _escape(ord(match[0])), text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def clipped(text: str, longest: int = LONGEST) -> str:
    """Return the text, or its beginning and the number of omitted characters."""
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text) - longest} more characters)"
