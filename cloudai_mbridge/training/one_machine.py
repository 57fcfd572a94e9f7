"""torchrun for the ranks of one machine. It resolves no host name.

    python -m cloudai_mbridge.training.one_machine --nproc-per-node N -m MODULE [ARGUMENT ...]

`torchrun --standalone` hands the machine's host name to the ranks as MASTER_ADDR, and resolves that name for its own
records too. Where the name does not resolve (a container, a laptop on a VPN) the ranks wait for minutes and fail.
"""

import socket
import sys
import uuid

from cloudai_mbridge.training.process.loopback import loopback_address, use_loopback


def main() -> None:
    socket.getfqdn = lambda name="": name or socket.gethostname()  # torchrun only writes it into its records
    use_loopback()
    # Imported only now: parts of torch may bind the function above when they are imported.
    from torch.distributed import run

    run.main([*rendezvous(loopback_address()), *sys.argv[1:]])


def rendezvous(address: str) -> list[str]:
    """Return torchrun's options for ranks that all meet at an address of this machine, on a free port."""
    endpoint = f"[{address}]:0" if ":" in address else f"{address}:0"
    options = {"nnodes": "1", "rdzv-backend": "c10d", "rdzv-endpoint": endpoint, "rdzv-id": str(uuid.uuid4())}
    return [f"--{name}={value}" for name, value in {**options, "local-addr": address}.items()]


if __name__ == "__main__":
    main()
