"""One rank gets the signal, all ranks learn of it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.signal_handler import DistributedSignalHandler

USR1 = signal.SIGUSR1


@pytest.fixture
def handler() -> Iterator[DistributedSignalHandler]:
    handler = DistributedSignalHandler(USR1)
    yield handler
    handler.release()


def arrive() -> None:
    signal.raise_signal(USR1)


def test_one_process_knows_for_itself(handler: DistributedSignalHandler) -> None:
    handler.install()
    assert handler.signals_received() == [False]
    arrive()
    arrive()
    assert handler.signals_received() == [True]
    assert handler.num_received == 2


def test_release_gives_back_the_handler_that_was_there(handler: DistributedSignalHandler) -> None:
    seen: list[int] = []
    before = signal.signal(USR1, lambda signum, frame: seen.append(signum))
    try:
        handler.install()
        handler.install()  # must not take its own handler for the previous one
        arrive()
        handler.release()
        handler.release()
        arrive()
    finally:
        signal.signal(USR1, before)
    assert handler.num_received == 1
    assert seen == [USR1]


def test_nothing_is_touched_before_install(handler: DistributedSignalHandler) -> None:
    before = signal.getsignal(USR1)
    handler.release()
    assert signal.getsignal(USR1) is before


def test_installing_again_starts_afresh(handler: DistributedSignalHandler) -> None:
    handler.install()
    arrive()
    handler.release()
    assert handler.signals_received() == [True]
    handler.install()
    assert handler.signals_received() == [False]


def test_a_with_block_releases_also_after_an_error() -> None:
    before = signal.getsignal(USR1)
    handler = DistributedSignalHandler(USR1)
    with contextlib.suppress(KeyError), handler:
        arrive()
        raise KeyError
    assert handler.signals_received() == [True]
    assert signal.getsignal(USR1) is before


def test_only_the_main_thread_can_install(handler: DistributedSignalHandler) -> None:
    errors: list[BaseException] = []

    def install() -> None:
        try:
            handler.install()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert "SIGUSR1 can be handled on the main thread only" in str(errors[0])


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_a_signal_that_nobody_can_handle_is_refused_by_name(sig: signal.Signals) -> None:
    with pytest.raises(ConfigError, match=rf"train\.exit_signal={sig.name} cannot be handled"):
        DistributedSignalHandler(sig).install()


SCRIPT = """
    import os, signal, subprocess, time
    import torch.distributed as dist
    from cloudai_mbridge.training.process.signal_handler import DistributedSignalHandler
    from cloudai_mbridge.training.process.log_lines import write_line

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with DistributedSignalHandler(signal.SIGUSR1) as handler:
        write_line(f"before {rank} {handler.signals_received()}")
        if rank == 1:
            signal.raise_signal(signal.SIGUSR1)
        write_line(f"after {rank} {handler.signals_received()}")
        if rank == 1:  # comes while this rank waits inside the barrier
            subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -USR1 {os.getpid()}"])
        else:
            time.sleep(1.5)
        dist.barrier()
        write_line(f"blocked {rank} {handler.signals_received()} {handler.num_received}")
    dist.destroy_process_group()
"""


def test_all_ranks_see_the_signal_of_one(ranks: Callable[..., Any]) -> None:
    lines = sorted(ranks(2, SCRIPT).stdout.splitlines())
    assert lines == [
        "after 0 [False, True]",
        "after 1 [False, True]",
        "before 0 [False, False]",
        "before 1 [False, False]",
        "blocked 0 [False, True] 0",
        "blocked 1 [False, True] 2",
    ]
