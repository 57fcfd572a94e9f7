"""Rendezvous of the ranks of one machine: an address that needs no name and no network. Standard library only."""

import os
import socket


def loopback_address() -> str:
    """Return 127.0.0.1, or ::1 if this machine has IPv6 only."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError:
        return "::1"
    return "127.0.0.1"


def resolve_no_name() -> None:
    """Leave this machine's full name unresolved; torchrun only writes it into its records."""
    socket.getfqdn = lambda name="": name or socket.gethostname()


def use_loopback() -> None:
    """Let gloo use the loopback interface, unless another is configured: by default gloo resolves the host name."""
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
