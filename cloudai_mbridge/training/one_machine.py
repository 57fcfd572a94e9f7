"""torchrun for the ranks of one machine. It resolves no host name.

    python -m cloudai_mbridge.training.one_machine --nproc-per-node N -m MODULE [ARGUMENT ...]

`torchrun --standalone` hands the machine's host name to the ranks as MASTER_ADDR, and resolves that name for its own
records too. Where the name does not resolve (a container, a laptop on a VPN) the ranks wait for minutes and fail.
"""

import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence

from cloudai_mbridge.training.process.loopback import loopback_address, use_loopback
from cloudai_mbridge.training.warm_start import client


def main() -> None:
    use_loopback()
    code = client.run(sys.argv[1:])
    if code is None:
        launch(sys.argv[1:])
    elif code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    else:
        sys.exit(code)


def launch(arguments: Sequence[str]) -> None:
    """Be torchrun."""
    resolve_no_name()
    # Imported only now: parts of torch may bind the function that was replaced when they are imported.
    from torch.distributed import run

    run.main([*rendezvous(loopback_address()), *arguments])


def resolve_no_name() -> None:
    """Leave this machine's full name unresolved; torchrun only writes it into its records."""
    socket.getfqdn = lambda name="": name or socket.gethostname()


def rendezvous(address: str) -> list[str]:
    """Return torchrun's options for ranks that all meet at an address of this machine, on a free port."""
    endpoint = f"[{address}]:0" if ":" in address else f"{address}:0"
    options = {"nnodes": "1", "rdzv-backend": "c10d", "rdzv-endpoint": endpoint, "rdzv-id": str(uuid.uuid4())}
    return [f"--{name}={value}" for name, value in {**options, "local-addr": address}.items()]


if __name__ == "__main__":
    main()
