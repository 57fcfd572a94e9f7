"""torchrun for the ranks of one machine. It resolves no host name.

    python -m cloudai_mbridge.training.one_machine --nproc-per-node N -m MODULE [ARGUMENT ...]

`torchrun --standalone` hands the machine's host name to the ranks as MASTER_ADDR, and resolves that name for its own
records too. If the name does not resolve (a container, a laptop on a VPN) the ranks wait for minutes and fail.
"""

import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from cloudai_mbridge.training.process.loopback import loopback_address, resolve_no_name, use_loopback
from cloudai_mbridge.training.warm_start import Forked, start_server

_FORK_OF = "MBRIDGE_FORK_OF"  # the server that has forked this process
_LOOK_S = 0.02  # between looks at the ranks


def main() -> None:
    use_loopback()
    fork_of = os.environ.pop(_FORK_OF, "")
    code = run_forked(server) if not fork_of and (server := start_server()) else None
    if code is None:
        launch(sys.argv[1:], fork_of)
    elif code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    else:
        sys.exit(code)


def run_forked(server: str) -> int | None:
    """Run torchrun in a fork of the server; return its exit code, negative for a signal. None: it was not started."""
    command = [sys.executable, "-u", "-m", "cloudai_mbridge.training.one_machine", *sys.argv[1:]]
    try:
        torchrun = Forked(server, command, {**os.environ, _FORK_OF: server})
    except (OSError, EOFError):
        return None

    def forward(number: int, frame: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(torchrun.pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    return torchrun.wait()


def launch(arguments: Sequence[str], server: str = "") -> None:
    """Be torchrun, whose ranks the server forks if there is one."""
    resolve_no_name()
    # Imported only now: parts of torch may bind the function that was replaced when they are imported.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    meet_at_once(dynamic_rendezvous)
    if server:
        fork_ranks(SubprocessHandler, server)
    run.main([*rendezvous(loopback_address()), *arguments])


def fork_ranks(handler: Any, server: str) -> None:
    """Have torchrun start ranks by the server, or as usual if the server cannot."""
    start_cold = handler._popen

    def start(self: Any, command: Sequence[str], env: Mapping[str, str]) -> Any:
        is_plain = tuple(command[:3]) == (sys.executable, "-u", "-m") and not (self._stdout or self._stderr)
        with suppress(OSError, EOFError):
            if is_plain:
                return Forked(server, command, env)
        return start_cold(self, command, env)

    handler._popen = start


def meet_at_once(rendezvous: Any) -> None:
    """Skip steps that take torchrun a third of a second: a random wait, so that not all machines come together, and
    the search of all source files for the names of the functions that its events name.
    """
    wait = rendezvous._delay
    rendezvous._delay = lambda seconds: None if isinstance(seconds, tuple) else wait(seconds)
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def rendezvous(address: str) -> list[str]:
    """Return torchrun's options for ranks that all meet at an address of this machine, on a free port."""
    endpoint = f"[{address}]:0" if ":" in address else f"{address}:0"
    options = {"nnodes": "1", "rdzv-backend": "c10d", "rdzv-endpoint": endpoint, "rdzv-id": str(uuid.uuid4())}
    options |= {"local-addr": address, "monitor-interval": str(_LOOK_S)}
    return [f"--{name}={value}" for name, value in options.items()]


if __name__ == "__main__":
    main()
