"""Which urls, commits, images and requirements may reach git, enroot and pip. Everything else is refused, not escaped.

Each check returns None or the reason why the value cannot be used; no reason repeats a credential.
"""

import re
from urllib.parse import urlsplit

from cloudai_mbridge.training.credentials.scrub import redacted

# What git forbids in the name of a ref, and a leading + or ^, which a refspec would give a meaning to
_NO_REF = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|^[+/]|[/.]$|//|\.lock$")
_DASH_HOST = re.compile(r"(?:://|@)-")
_HELPER = re.compile(r"[A-Za-z0-9+.-]+::")
_SCP_LIKE = re.compile(r"(?:[^\s/:@]+@)?[^\s/:@]+:.+")
_CREDENTIAL = "carries a credential; take it out and let git's credential helper or ~/.netrc supply it"
_SCHEMES = ("https", "http", "ssh", "git", "file")
_IMAGE = re.compile(
    r"(?:(?P<user>[A-Za-z0-9$._-]+)@)?"
    r"(?:(?P<registry>[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?)#)?"
    r"(?P<image>[a-z0-9][a-z0-9/._-]*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._:-]*))?"
)


def problem_of_url(url: str) -> str | None:
    """Return why git cannot be given this url. A credential has no place in one: it would show in argv and on disk."""
    shown = redacted(url)
    if re.search(r"[\x00-\x20\x7f]", url) or not url:
        return f"{shown!r} is empty or holds blanks or control characters; write the repository's address"
    if url.startswith("-"):
        return f"{shown!r} begins with '-'; git would take it for an option"
    if _HELPER.match(url):
        return f"{shown!r} names a remote helper, which may run anything; use one of {', '.join(_SCHEMES)}"
    if "://" in url:
        return _problem_of_scheme(url)
    if re.match(r"[^/@]*:[^/@]*@", url):
        return f"{shown!r} {_CREDENTIAL}"
    if not url.startswith("/") and not _SCP_LIKE.fullmatch(url):
        return f"{shown!r} is neither an address nor a full path; write https://..., git@host:path or /path"
    return f"{shown!r} has a host that begins with '-'" if _DASH_HOST.search(url) else None


def _problem_of_scheme(url: str) -> str | None:
    shown = redacted(url)
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"{shown!r} is not an address"
    if parts.password is not None or (parts.scheme in ("http", "https") and parts.username is not None):
        return f"{shown!r} {_CREDENTIAL}"
    if parts.scheme not in _SCHEMES:
        return f"{shown!r} has the scheme {parts.scheme!r}; use one of {', '.join(_SCHEMES)}"
    return f"{shown!r} has a host that begins with '-'" if _DASH_HOST.search(url) else None


def problem_of_commit(commit: str) -> str | None:
    """Return why git cannot be given this commit, branch or tag."""
    if commit.startswith("-"):
        return f"{commit!r} begins with '-'; git would take it for an option"
    if not commit or _NO_REF.search(commit):
        return f"{commit!r} is not the name of a commit, branch or tag; write one as git shows it"
    return None


def problem_of_image(image: str) -> str | None:
    """Return why enroot cannot be given this image."""
    if image.startswith(("/", ".")):
        return f"{image!r}: no such image file; check the path"
    if re.match(r"(?:docker://)?[^/#]*:[^/#]*@", image) and "@sha256:" not in image:
        return "the image's name carries a credential; take it out and put it into enroot's .credentials file"
    if _parse_image(image):
        return None
    return f"{redacted(image)!r} is not an image such as nvcr.io#nvidia/nemo:26.02.00, nor a file"


def problem_of_requirement(requirement: str) -> str | None:
    """Return why pip cannot be given this requirement."""
    return f"{requirement!r} begins with '-'; pip would take it for an option" if requirement.startswith("-") else None


def enroot_uri(image: str) -> str:
    """Return docker://[USER@][REGISTRY#]IMAGE[:TAG] for an image in this or in Docker's spelling, registry/image:tag.

    Enroot takes everything before the first # for the registry, and asks Docker Hub where there is none.
    """
    if (match := _parse_image(image)) is None:
        raise ValueError(f"{image!r} is not an image")
    user = f"{match['user']}@" if match["user"] else ""
    registry = f"{match['registry']}#" if match["registry"] else ""
    tag = f":{match['tag']}" if match["tag"] else ""
    return f"docker://{user}{registry}{match['image']}{tag}"


def _parse_image(image: str) -> re.Match[str] | None:
    name = image.removeprefix("docker://").replace("@sha256:", ":sha256:")
    user, at, rest = name.rpartition("@")
    first, slash, path = rest.partition("/")
    if "#" not in rest and slash and ("." in first or ":" in first or first == "localhost"):
        rest = f"{first}#{path}"
    return _IMAGE.fullmatch(user + at + rest)
