"""A signal that requests a checkpoint and an exit.

A scheduler may signal one process only: the handler notes it, and the loop polls all ranks once per step. The names
follow Megatron-Core's `dist_signal_handler`.
"""

import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.device import current_device


class DistributedSignalHandler:
    """Counter of one signal's arrivals while installed. sig: the signal; nothing happens before `install`."""

    def __init__(self, sig: signal.Signals = signal.SIGTERM) -> None:
        self.sig = sig
        self.num_received = 0
        self._previous: Any = None
        self._is_installed = False

    def install(self) -> None:
        """Watch the signal from now on; a second call changes nothing.

        Raises ConfigError: this signal cannot be handled. RuntimeError: not on the main thread (required by Python).
        """
        if self._is_installed:
            return
        self._previous = self._set(self._note)
        self.num_received = 0
        self._is_installed = True

    def release(self) -> None:
        """Put back the handler that was there before `install`; a second call changes nothing.

        Raises RuntimeError: not on the main thread.
        """
        if self._is_installed:
            # None: it was set by something else than Python, and cannot be put back
            self._set(signal.SIG_DFL if self._previous is None else self._previous)
            self._is_installed = False

    def signals_received(self) -> list[bool]:
        """Return, per rank, whether the signal arrived since `install`, even if it was released since.

        A collective: every rank must call it. Without process groups the answer is this process's alone.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [self.num_received > 0]
        mine = torch.tensor([self.num_received > 0], dtype=torch.uint8, device=current_device())
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return [bool(flag) for flag in torch.cat(everyone).tolist()]

    def __enter__(self) -> "DistributedSignalHandler":
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _note(self, *_: object) -> None:
        self.num_received += 1

    def _set(self, handler: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"{self.sig.name} can be handled on the main thread only: call this from there")
        try:
            return signal.signal(self.sig, handler)
        except OSError as error:
            raise ConfigError(f"train.exit_signal={self.sig.name} cannot be handled: use SIGTERM or SIGUSR1") from error
