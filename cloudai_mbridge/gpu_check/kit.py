"""Context of every part: the machine's facts, a directory, a deadline, and processes that end with it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
TERM_WAIT_S = 15.0  # mbridge cancels its ranks and writes its report in this time
KILL_WAIT_S = 5.0  # longer only for a process that a driver holds: it is left
MUON = "emerging-optimizers"  # the package
_TAIL_CHARACTERS = 400


class PartSkipped(Exception):
    """A part cannot run here; the message contains the reason."""


class PartFailed(Exception):
    """A part has failed; figures: found before the failure."""

    def __init__(self, reason: str, figures: Figures | None = None) -> None:
        super().__init__(reason)
        self.figures = figures or {}


class OutOfTime(PartFailed):
    """The part's deadline."""


@dataclass(frozen=True)
class Device:
    """The machine. gpu: the device's name, None without one; gpu_type: its name in mbridge's table of hardware.

    no_gpu, no_transformer_engine: why it cannot be used; empty if it can. has_nvidia_smi: a GPU is expected.
    packages: name -> version.
    """

    gpu: str | None = None
    no_gpu: str = "no GPU that torch can use"
    has_nvidia_smi: bool = False
    gpu_type: str | None = None
    memory_gib: float | None = None
    no_transformer_engine: str = "not probed"
    packages: Mapping[str, str | None] = field(default_factory=dict)


@dataclass
class Kit:
    """deadline: on the monotonic clock, set for each part. shared: results for later parts."""

    work: Path
    device: Device
    deadline: float = float("inf")
    shared: dict[str, Any] = field(default_factory=dict)

    def run(
        self, argv: Sequence[str], *, log: str, env: Mapping[str, str] | None = None, codes: Sequence[int] = (0,)
    ) -> int:
        """Run a command until the part's deadline and return its exit code; its streams are kept in `work`.

        PartFailed: another exit code than `codes`.
        OutOfTime: the deadline has ended it; nothing is started after that.
        """
        if time.monotonic() >= self.deadline:
            raise OutOfTime(f"{_name(argv)}: not started: the part's time was used up")
        out, err = self.work / f"{log}.stdout", self.work / f"{log}.stderr"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                list(argv),
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            code = process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise OutOfTime(f"{_name(argv)}: still running when the part's time was used up") from None
        finally:
            end(process)
        if code not in codes:
            raise PartFailed(f"{_name(argv)}: exit code {code}: {self.tail(log)}")
        return code

    def mbridge(self, *arguments: str | Path, log: str, codes: Sequence[int] = (0,), **env: str) -> int:
        """Run a command of mbridge; return its exit code."""
        argv = [sys.executable, "-m", "cloudai_mbridge", *map(str, arguments)]
        return self.run(argv, log=log, env=env, codes=codes)

    def worker(self, module: str, *arguments: str | Path, log: str, **env: str) -> Figures:
        """Run a module of this package that prints one JSON object as its last line; return that."""
        argv = [sys.executable, "-m", f"cloudai_mbridge.gpu_check.workers.{module}", *map(str, arguments)]
        self.run(argv, log=log, env=env)
        lines = (self.work / f"{log}.stdout").read_text(encoding="utf-8", errors="replace").splitlines()
        if not lines:
            raise PartFailed(f"{module}: printed nothing")
        return dict(json.loads(lines[-1]))

    def tail(self, log: str) -> str:
        """Return the end of a command's output, stderr before stdout."""
        for stream in ("stderr", "stdout"):
            text = (self.work / f"{log}.{stream}").read_text(encoding="utf-8", errors="replace").strip()
            if text:
                return text[-_TAIL_CHARACTERS:]
        return "no output"


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a command's remaining processes: SIGTERM, which mbridge passes on to its ranks, then SIGKILL to its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERM_WAIT_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_WAIT_S)


def _name(argv: Sequence[str]) -> str:
    """Return a command's display name: its module and first argument."""
    words = list(argv[argv.index("-m") + 1 :]) if "-m" in argv else list(argv)
    return " ".join(words[:2])


def needs_gpu(kit: Kit) -> None:
    """Require a GPU that torch can use; if nvidia-smi exists, a missing GPU is a failure."""
    if kit.device.gpu is not None:
        return
    if kit.device.has_nvidia_smi:
        raise PartFailed(f"{kit.device.no_gpu}, although this machine has nvidia-smi")
    raise PartSkipped(kit.device.no_gpu)


def needs_known_gpu(kit: Kit) -> None:
    """Require a GPU that the estimates support."""
    needs_gpu(kit)
    if kit.device.gpu_type is None:
        raise PartSkipped(f"no estimates for {kit.device.gpu}")


def needs_muon(kit: Kit) -> None:
    """Require the package of Muon."""
    needs_gpu(kit)
    if kit.device.packages.get(MUON) is None:
        raise PartSkipped(f"no {MUON}: pip install 'cloudai-mbridge[emerging]'")


def needs_transformer_engine(kit: Kit) -> None:
    """Require Transformer Engine."""
    if kit.device.no_transformer_engine:
        raise PartSkipped(f"no Transformer Engine: {kit.device.no_transformer_engine}")
