"""Where everything of a sandbox lies; the only place that builds its paths."""

import re
from pathlib import Path

from tests.sandbox.errors import SandboxError

# sockaddr_un.sun_path is 108 bytes with the final NUL (unix(7)).
MAX_SOCKET_PATH = 107

# The longest job and step ids slurmd puts into a socket's name (4294967291 is the batch step).
LONGEST_STEP = "_1234567.4294967291"


class SandboxLayout:
    """Name the files and folders of the sandbox in `directory` (absolute, symlinks resolved)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state_file = directory / "sandbox.json"  # what was started; its presence makes a directory a sandbox
        self.slurm_conf = directory / "slurm.conf"  # Slurm reads its other configuration files beside it
        self.hosts = directory / "hosts"  # /etc/hosts of the nodes
        self.munge = directory / "munge"
        self.munge_socket = self.munge / "munge.sock"
        self.job_state = directory / "state/job_state"  # where slurmctld saves its jobs
        self.mysql_data = directory / "mysql"
        self.mysql_socket = directory / "run/mysqld.sock"
        self.logs = directory / "log"

    def gpu_device(self, index: int | str) -> Path:
        """Return the device file of a fake GPU; its trailing digits become CUDA_VISIBLE_DEVICES."""
        return self.directory / f"dev/nvidia{index}"

    def spool(self, node: str) -> Path:
        """Return slurmd's private folder on `node`."""
        return self.directory / "spool" / node

    def node_status(self, node: str) -> Path:
        """Return the file in which the node's supervisor says up, down or crashed."""
        return self.directory / "run" / f"{node}.status"

    def folders(self, nodes: list[str]) -> list[Path]:
        """List the folders that must exist before any daemon starts."""
        named = [self.munge, self.logs, *(self.directory / name for name in ("state", "run", "dev"))]
        return [*named, *(self.spool(node) for node in nodes)]


def check_directory(directory: Path, longest_node: str) -> None:
    """Refuse a directory whose path Slurm's files or unix sockets cannot hold."""
    if bad := re.sub(r"[\w./+-]", "", str(directory), flags=re.ASCII):
        raise SandboxError(
            f"{directory}: {bad[0]!r} in the path is not safe in Slurm's configuration files; "
            "use a directory of letters, digits and . _ + - only, such as /tmp/sandbox"
        )
    tail = len(str(SandboxLayout(Path("/")).spool(longest_node) / f"{longest_node}{LONGEST_STEP}"))
    if (length := len(str(directory))) + tail > MAX_SOCKET_PATH:
        raise SandboxError(
            f"{directory}: the path is too long for unix sockets ({length} characters, at most "
            f"{MAX_SOCKET_PATH - tail} with this node name); use a shorter directory, such as /tmp/sandbox"
        )
