"""POST request whose messages show nothing of the URL."""

import urllib.error
import urllib.request
from urllib.parse import urlsplit

_TIMEOUT_S = 30.0


def post(url: str, body: bytes) -> str:
    """Post JSON; return the problem, "" on success. May raise any exception that urllib raises for a URL."""
    if urlsplit(url).scheme not in ("http", "https"):
        return "is not a URL that begins with https:// or http://"
    headers = {"Content-Type": "application/json", "User-Agent": "cloudai-mbridge"}
    request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310
    redirects = urllib.request.HTTPRedirectHandler()  # follows none: a POST would become a GET without content
    redirects.redirect_request = lambda *_: None  # type: ignore[method-assign]
    try:
        with urllib.request.build_opener(redirects).open(request, timeout=_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"the server answered {error.code}"
    except urllib.error.URLError as error:
        if isinstance(error.reason, str):
            return "its address, or that of a proxy, cannot be used"
        return getattr(error.reason, "strerror", None) or type(error.reason).__name__
