"""The webhook: a POST of the JSON. Its URL may hold a credential, so no message shows any of it."""

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.models.scenario import OnCompletion

_TIMEOUT_S = 30.0
_LONGEST_URL = 1 << 14


class Webhook:
    """A request that was started. A thread waits for it that nothing has to wait for: a server may never answer."""

    def __init__(self, asked: OnCompletion, body: bytes) -> None:
        self._asked, self._body, self._why = asked, body, ""
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, asked: OnCompletion, body: bytes) -> Iterator[Self]:
        """Start the request that was asked for, if any."""
        if asked.webhook_env or asked.webhook_file:
            yield cls(asked, body)

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def end(self, why: str) -> str:
        """Return what went wrong, "" if nothing did. why: it is not waited for."""
        problem = why if self.is_open else self._why
        return f"webhook {self._name}: {problem}" if problem else ""

    @property
    def _name(self) -> str:
        return f"${self._asked.webhook_env}" if self._asked.webhook_env else f"of {self._asked.webhook_file}"

    def _send(self) -> None:
        try:
            self._why = self._problem()
        except Exception as error:
            self._why = _words(error)

    def _problem(self) -> str:
        url = self._url()
        if not url:
            return "is not set"
        if urlsplit(url).scheme not in ("http", "https"):
            return "is not a URL that begins with https:// or http://"
        headers = {"Content-Type": "application/json", "User-Agent": "cloudai-mbridge"}
        request = urllib.request.Request(url, self._body, headers, method="POST")  # noqa: S310
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT_S):
            return ""

    def _url(self) -> str:
        if self._asked.webhook_file:
            return read_regular(Path(self._asked.webhook_file), _LONGEST_URL).decode().strip()
        return os.environ.get(self._asked.webhook_env or "", "").strip()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET, which tells nothing."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _words(error: Exception) -> str:
    """Return why a request failed, without text that may hold the URL."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return getattr(reason, "strerror", None) or type(reason).__name__
