"""POST request whose messages show nothing of the URL."""

import urllib.error
import urllib.request
from urllib.parse import urlsplit

_TIMEOUT_S = 30.0
_HANDLERS = (
    *(urllib.request.ProxyHandler, urllib.request.HTTPHandler, urllib.request.HTTPSHandler),
    *(urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPErrorProcessor),
)


def post(url: str, body: bytes) -> str:
    """Post JSON; return the problem, "" on success. May raise any exception that urllib raises for a URL."""
    if urlsplit(url).scheme not in ("http", "https"):
        return "is not a URL that begins with https:// or http://"
    headers = {"Content-Type": "application/json", "User-Agent": "cloudai-mbridge"}
    request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310
    opener = urllib.request.OpenerDirector()  # follows no redirect: it would become a GET without content
    for handler in _HANDLERS:
        opener.add_handler(handler())
    try:
        with opener.open(request, timeout=_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"the server answered {error.code}"
    except urllib.error.URLError as error:
        return getattr(error.reason, "strerror", None) or type(error.reason).__name__
