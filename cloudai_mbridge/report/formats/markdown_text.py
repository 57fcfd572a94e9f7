"""Escape text for GitHub-flavoured Markdown so that it is shown unchanged."""

import html
import re

from cloudai_mbridge.files.text import clipped, visible

# All characters of Markdown markup, and the starts of a list. An entity is never markup, and shows as itself
_MARKUP = re.compile(r"""[\\`*_{}\[\]()<>#+!|~&"'$^@]|:(?=\S)|^-|^\d(?=\d*[.)](\s|$))""")
# GitHub makes links, mentions and pictures of plain text: a comment in the middle stops it, and is invisible
_BREAK = "<!-- -->"
_JOINED = "@#:"
_ADDRESS = re.compile(r"(?i)\b(www)(?=\.)")


def inline(text: str) -> str:
    """Return a text for a table cell, a heading or a paragraph; line breaks are kept."""
    return "<br>".join(_line(line) for line in clipped(text).split("\n"))


def _line(text: str) -> str:
    parts = _ADDRESS.split(visible(text).replace("\t", " "))
    return "".join(f"{part}{_BREAK}" if i % 2 else _MARKUP.sub(_entity, part) for i, part in enumerate(parts))


def _entity(match: re.Match[str]) -> str:
    return f"&#{ord(match[0])};" + (_BREAK if match[0] in _JOINED else "")


def preformatted(lines: list[str]) -> str:
    """Return lines unchanged, in a block that no line can end: only a tag ends it, and tags are escaped."""
    return "<pre>\n" + "\n".join(html.escape(visible(clipped(line)), quote=False) for line in lines) + "\n</pre>"


def fenced(text: str, language: str) -> str:
    """Return a text unchanged, in a block of code that no line of it can end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{visible(text).rstrip()}\n{fence}"


def folded(title: str, body: str) -> str:
    """Return a block folded under a title. The blank lines end one block of HTML and begin the next."""
    text = html.escape(" ".join(visible(clipped(title)).split()), quote=False)
    # GitHub looks for no mentions in <code>
    return f"<details><summary><code>{text}</code></summary>\n\n{body}\n\n</details>\n"
