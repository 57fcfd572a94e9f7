"""Where everything of a sandbox lies; the only place that builds its paths."""

import re
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.sandbox.errors import SandboxError

# sockaddr_un.sun_path is 108 bytes with the final NUL (unix(7)).
MAX_SOCKET_PATH = 107

# The longest job and step ids slurmd puts into a socket's name (4294967291 is the batch step).
LONGEST_STEP = "_1234567.4294967291"


@dataclass(frozen=True)
class SandboxLayout:
    """Name the files and folders of the sandbox in `directory` (absolute, symlinks resolved)."""

    directory: Path

    @property
    def state_file(self) -> Path:
        """Return the file that says what was started; its presence makes a directory a sandbox."""
        return self.directory / "sandbox.json"

    @property
    def slurm_conf(self) -> Path:
        """Return slurm.conf; Slurm looks for its other configuration files beside it."""
        return self.directory / "slurm.conf"

    @property
    def hosts(self) -> Path:
        """Return the /etc/hosts of the nodes."""
        return self.directory / "hosts"

    @property
    def munge(self) -> Path:
        """Return munged's folder."""
        return self.directory / "munge"

    @property
    def munge_socket(self) -> Path:
        """Return the socket through which the sandbox's daemons and clients authenticate."""
        return self.munge / "munge.sock"

    @property
    def job_state(self) -> Path:
        """Return the file in which slurmctld saves its jobs."""
        return self.directory / "state/job_state"

    @property
    def mysql_data(self) -> Path:
        """Return the accounting database's folder."""
        return self.directory / "mysql"

    @property
    def mysql_socket(self) -> Path:
        """Return the accounting database's socket."""
        return self.directory / "run/mysqld.sock"

    @property
    def logs(self) -> Path:
        """Return the folder of all daemons' logs."""
        return self.directory / "log"

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
