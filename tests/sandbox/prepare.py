"""Check that a sandbox can start, and write everything its daemons read."""

import os
import pwd
import secrets
from pathlib import Path

from tests.sandbox import host
from tests.sandbox.conf import SandboxSpec, Site, render_files
from tests.sandbox.errors import SandboxError
from tests.sandbox.fleet import SandboxState, write_state
from tests.sandbox.layout import SandboxLayout, check_directory


def check(spec: SandboxSpec, layout: SandboxLayout) -> None:
    """Refuse a start that cannot work, before anything is written."""
    directory = layout.directory
    check_directory(directory, spec.node_names[-1])
    host.check_programs(spec.accounting)
    if spec.cgroup and os.getuid():
        raise SandboxError("cgroup=True needs root; do without it (jobs over their memory are then FAILED)")
    if directory.exists() and not directory.is_dir():
        raise SandboxError(f"{directory}: not a directory; use another path")
    if directory.exists() and not layout.state_file.exists() and any(directory.iterdir()):
        # stop(purge=True) removes the directory, which must not be a user's project
        raise SandboxError(f"{directory}: not empty and not a sandbox; use a new or an empty directory")


def user_name() -> str:
    """Return the calling user's name, as whom all daemons run."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise SandboxError(f"user {os.getuid()} has no name, which Slurm wants; add it to /etc/passwd") from None


def write(spec: SandboxSpec, layout: SandboxLayout) -> Site:
    """Write the state file, the folders, the munge key, the fake GPUs and the configuration files."""
    site = Site(layout, host.free_ports(2 + spec.nodes), user_name(), host.slurm_version())
    layout.directory.mkdir(parents=True, exist_ok=True)
    write_state(layout.state_file, SandboxState(spec))  # first, so that a later stop knows this directory
    for folder in layout.folders(spec.node_names):
        folder.mkdir(parents=True, exist_ok=True)
    for name in spec.node_names:
        layout.node_status(name).unlink(missing_ok=True)
    layout.munge.chmod(0o755)  # munged's clients must reach its socket
    _write_private(layout.munge / "munge.key", secrets.token_bytes(128))
    for index in range(spec.gpus):
        # Slurm wants a device and gets one: no root is needed, and no real GPU is touched
        if not (device := layout.gpu_device(index)).is_symlink():
            device.symlink_to("/dev/null")
    for name, text in render_files(spec, site, Path("/etc/hosts").read_text()).items():
        if name == "slurmdbd.conf":
            _write_private(layout.directory / name, text.encode())
        else:
            (layout.directory / name).write_text(text)
    return site


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, from its first byte on."""
    path.touch(mode=0o600)
    path.write_bytes(content)
