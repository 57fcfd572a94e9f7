"""A name server for a namespace: knows no name, and writes down what it is asked. Then runs a command.

python name_server.py QUERIES COMMAND [ARGUMENT ...]
"""

import socket
import subprocess
import sys
import threading
from pathlib import Path

ADDRESS = ("127.0.0.53", 53)
_NO_SUCH_NAME = b"\x81\x83"


def main() -> int:
    queries, *command = sys.argv[1:]
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(ADDRESS)
    threading.Thread(target=_serve, args=(server, Path(queries)), daemon=True).start()
    return subprocess.run(command, check=False).returncode


def _serve(server: socket.socket, queries: Path) -> None:
    with queries.open("w", buffering=1) as out:
        while True:
            data, sender = server.recvfrom(4096)
            out.write(_name(data) + "\n")
            server.sendto(data[:2] + _NO_SUCH_NAME + data[4:], sender)


def _name(query: bytes) -> str:
    labels, at = [], 12
    while size := query[at]:
        labels.append(query[at + 1 : at + 1 + size].decode(errors="replace"))
        at += 1 + size
    return ".".join(labels)


if __name__ == "__main__":
    sys.exit(main())
