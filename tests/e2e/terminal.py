"""A command in a terminal of its own, with a fixed number of lines and columns."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping
from pathlib import Path

# rich's erasure of the last frame: of every line, upwards
_ERASED = re.compile(r"\r?\x1b\[2K(?:\x1b\[1A\x1b\[2K)+")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """A process whose controlling terminal is a pseudo terminal; its interface is that of `subprocess.Popen`."""

    def __init__(self, program: list[str], size: tuple[int, int], directory: Path, env: Mapping[str, str]) -> None:
        """size: lines and columns."""
        self._written, self._is_closing = b"", threading.Event()
        self._env = {**env, "TERM": "xterm-256color", "LINES": str(size[0]), "COLUMNS": str(size[1])}
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _IN_ITS_SESSION, *program],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=self._env,
            cwd=directory,
        )
        self.pid = self._process.pid
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Read until the program has closed its side, or `close`: a blocking read would keep the terminal open."""
        while not self._is_closing.is_set():
            if select.select([self._master], [], [], 0.05)[0]:
                try:
                    chunk = os.read(self._master, 1 << 16)
                except OSError:  # the program has closed its side
                    return
                if not chunk:
                    return
                self._written += chunk

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        code = self._process.wait(timeout)
        self._reader.join(timeout=5)
        return code

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def type(self, keys: bytes) -> None:
        """Press keys; the terminal turns some into signals to all processes in its foreground."""
        os.write(self._master, keys)

    def close(self) -> None:
        """Close the window."""
        self._is_closing.set()
        self._reader.join()
        os.close(self._master)

    def text(self) -> str:
        """Return everything written so far, without control characters."""
        return _CONTROL.sub("", self._written.decode(errors="replace"))

    def count(self, words: str) -> int:
        return self.text().count(words)

    def frame(self) -> str:
        """Return the last whole frame of a live view: the text between two erasures."""
        frames = _ERASED.split(self._written.decode(errors="replace"))
        lines = _CONTROL.sub("", frames[-2] if len(frames) > 2 else "").splitlines()
        return "\n".join(line.rstrip() for line in lines).strip("\n")


_IN_ITS_SESSION = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
