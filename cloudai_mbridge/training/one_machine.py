"""torchrun for the ranks of one machine. It resolves no host name.

    python -m cloudai_mbridge.training.one_machine --nproc-per-node N -m MODULE [ARGUMENT ...]

`torchrun --standalone` hands the machine's host name to the ranks as MASTER_ADDR, and resolves that name for its own
records too. Where the name does not resolve (a container, a laptop on a VPN) the ranks wait for minutes and fail.
"""

import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from cloudai_mbridge.training.process.loopback import loopback_address, use_loopback
from cloudai_mbridge.training.warm_start import ForkedRank, start_server

_LOOK_S = 0.02  # between looks at the ranks


def main() -> None:
    use_loopback()
    launch(sys.argv[1:])


def launch(arguments: Sequence[str]) -> None:
    """Be torchrun, with ranks of the fork server where there is one."""
    server = start_server()
    resolve_no_name()
    # Imported only now: parts of torch may bind the function that was replaced when they are imported.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    meet_at_once(dynamic_rendezvous)
    if server:
        start_warm(SubprocessHandler, server)
    run.main([*rendezvous(loopback_address()), *arguments])


def start_warm(handler: Any, server: str) -> None:
    """Have torchrun start ranks by the server, and those that it cannot start as ever."""
    start_cold = handler._popen

    def start(self: Any, command: Sequence[str], env: Mapping[str, str]) -> Any:
        is_plain = tuple(command[:3]) == (sys.executable, "-u", "-m") and not (self._stdout or self._stderr)
        with suppress(OSError, EOFError):
            if is_plain:
                return ForkedRank(server, command, env)
        return start_cold(self, command, env)

    handler._popen = start


def resolve_no_name() -> None:
    """Leave this machine's full name unresolved; torchrun only writes it into its records."""
    socket.getfqdn = lambda name="": name or socket.gethostname()


def meet_at_once(rendezvous: Any) -> None:
    """Leave out what takes torchrun a third of a second: a random wait, so that not all machines come together, and
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
