"""torchrun for the ranks of one machine, which looks up no name.

    python -m cloudai_mbridge.training.one_machine --nproc-per-node N -m MODULE [ARGUMENT ...]

`torchrun --standalone` hands the machine's host name to the ranks as MASTER_ADDR, and resolves that name for its own
records too. Where the name does not resolve (a container, a laptop on a VPN) the ranks wait for minutes and fail. Here
the ranks meet on the loopback address, and the host name is resolved nowhere.
"""

import os
import socket
import sys
import uuid

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK_INTERFACE = "lo"


def main() -> None:
    socket.getfqdn = _host_name
    use_loopback()
    # Imported only now: parts of torch bind the function above when they are imported.
    from torch.distributed import run

    run.main([*rendezvous(loopback_address()), *sys.argv[1:]])


def rendezvous(address: str) -> list[str]:
    """Return torchrun's options for ranks that all meet at an address of this machine, on a free port."""
    endpoint = f"[{address}]:0" if ":" in address else f"{address}:0"
    options = {"nnodes": "1", "rdzv-backend": "c10d", "rdzv-endpoint": endpoint, "rdzv-id": str(uuid.uuid4())}
    return [f"--{name}={value}" for name, value in {**options, "local-addr": address}.items()]


def loopback_address() -> str:
    """Return 127.0.0.1, or ::1 where this machine has IPv6 only."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError:
        return "::1"
    return "127.0.0.1"


def use_loopback() -> None:
    """Let gloo use the loopback interface, unless it is told which one to use: else it resolves the host name."""
    if _LOOPBACK_INTERFACE in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault(_GLOO_INTERFACE, _LOOPBACK_INTERFACE)


def _host_name(name: str = "") -> str:
    """Return a name as it is: torchrun only writes it into its records."""
    return name or socket.gethostname()


if __name__ == "__main__":
    main()
