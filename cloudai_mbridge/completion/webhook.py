"""Webhook: a POST of the JSON. Its URL may hold a credential, so no message shows any of it."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.models.scenario import OnCompletion

_LONGEST_URL = 1 << 14


class Webhook:
    """A started request. Its thread is a daemon, since a server may never answer."""

    def __init__(self, asked: OnCompletion, body: bytes) -> None:
        self._asked, self._body, self._why = asked, body, ""
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, asked: OnCompletion, body: bytes) -> Iterator[Self]:
        """Start the configured request, if any."""
        if asked.webhook_env or asked.webhook_file:
            yield cls(asked, body)

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def end(self, why: str) -> str:
        """Return the problem, "" on success. why: the reason to stop waiting."""
        problem = why if self.is_open else self._why
        return f"webhook {self._name}: {problem}" if problem else ""

    @property
    def _name(self) -> str:
        return f"${self._asked.webhook_env}" if self._asked.webhook_env else f"of {self._asked.webhook_file}"

    def _send(self) -> None:
        try:
            self._why = self._problem()
        except Exception as error:
            self._why = getattr(error, "strerror", None) or type(error).__name__

    def _problem(self) -> str:
        from cloudai_mbridge.completion.post import post  # imported only if a webhook is configured

        url = self._url()
        return post(url, self._body) if url else "is not set"

    def _url(self) -> str:
        if self._asked.webhook_file:
            return read_regular(Path(self._asked.webhook_file), _LONGEST_URL).decode().strip()
        return os.environ.get(self._asked.webhook_env or "", "").strip()
