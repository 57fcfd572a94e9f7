"""What the sandbox needs from this machine: programs, ports, namespaces, a clean environment."""

import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from tests.sandbox.errors import SandboxError

# program -> Debian package
SLURM_PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmstepd": "slurmd",
    **dict.fromkeys(("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun"), "slurm-client"),
}
ACCOUNTING_PROGRAMS = {
    "sacct": "slurm-client",
    "slurmdbd": "slurmdbd",
    "mariadb": "mariadb-client-core",
    **dict.fromkeys(("mariadbd", "mariadb-install-db"), "mariadb-server-core"),
}

# How a client or daemon would take part in the Slurm job that this process may itself be running in, or take over the
# options a user has set for another cluster.
JOB_PREFIXES = (
    *("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_", "SPRIO_"),
    *("SDIAG_", "SSHARE_", "SREPORT_", "SATTACH_", "SBCAST_", "SCRON_", "SPANK_", "PMI_", "PMIX_", "PMI2_"),
)

# A node's own hostname and /etc/hosts.  $0 is the hostname, $1 the hosts file, the rest a command.
ENTER_NODE = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'

LOWEST_PORT, PORT_SPAN = 10000, 10000


def search_path(environ: Mapping[str, str]) -> str:
    """Return PATH with the folders of the daemons, which an unprivileged user's PATH lacks."""
    folders = [*environ.get("PATH", os.defpath).split(":"), "/usr/sbin", "/sbin"]
    return ":".join(dict.fromkeys(folder for folder in folders if folder))


def find_program(name: str) -> str:
    """Return a program's path under its plain name.

    The name matters: a daemon started as "slurmd-wlm" does not know that it is slurmd and drops every `Gres=`.
    """
    if path := shutil.which(name, path=search_path(os.environ)):
        return path
    raise SandboxError(f"{name} is not installed; install it and try again")


def missing_programs(accounting: bool = False) -> list[str]:
    """List the Slurm and munge programs that a sandbox needs and this machine lacks."""
    needed = SLURM_PROGRAMS | (ACCOUNTING_PROGRAMS if accounting else {})
    path = search_path(os.environ)
    return [name for name in needed if shutil.which(name, path=path) is None]


def check_programs(accounting: bool = False) -> None:
    """Raise an error that says how to install the programs that are missing."""
    if missing := missing_programs(accounting):
        known = SLURM_PROGRAMS | ACCOUNTING_PROGRAMS
        packages = dict.fromkeys(known[name] for name in missing)
        raise SandboxError(
            f"not installed: {', '.join(missing)}; "
            f"install with: sudo apt-get install --no-install-recommends {' '.join(packages)}"
        )


def slurm_version() -> tuple[int, int]:
    """Return the version of the installed slurmctld, such as (22, 5)."""
    text = subprocess.run([find_program("slurmctld"), "-V"], capture_output=True, text=True, check=True).stdout
    major, minor = text.split()[-1].split(".")[:2]  # "slurm-wlm 22.05.8"
    return int(major), int(minor)


def is_job_variable(name: str) -> bool:
    """Tell whether an environment variable belongs to a Slurm job or to another cluster's clients."""
    return name.startswith(JOB_PREFIXES)


def without_job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment as it would be outside every Slurm job."""
    return {name: value for name, value in environ.items() if not is_job_variable(name)}


def namespace_argv() -> list[str]:
    """Return the command that enters a node's namespaces, after trying that this machine allows it."""
    argv = ["unshare", "--uts", "--mount"]
    if os.getuid():
        argv += ["--user", "--map-current-user", "--keep-caps"]
    try:
        trial = [*argv, "sh", "-c", ENTER_NODE, "sandbox", "/etc/hosts", "true"]
        tried = subprocess.run(trial, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        reason = tried.stderr.strip().replace("\n", "; ") if tried.returncode else ""
    except FileNotFoundError as error:
        reason = f"{error.filename} is not installed"
    if reason:
        raise SandboxError(
            f"this machine does not allow a hostname per node ({reason}); "
            "do without: hostnames=False, --no-hostnames (node names then do not resolve in jobs)"
        )
    return argv


def free_ports(count: int) -> tuple[int, ...]:
    """Return ports that nothing listens on.

    They lie below the ephemeral range: above, any outgoing connection may take one between this check and the
    daemon's bind, or while a crashed node is down.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(LOWEST_PORT, max(ephemeral, LOWEST_PORT + PORT_SPAN))
    found = tuple(islice(filter(_can_bind, random.sample(candidates, len(candidates))), count))
    if len(found) < count:
        raise SandboxError(f"only {len(found)} of {count} ports are free; use fewer nodes")
    return found


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))  # every address: where Slurm's daemons bind
        except OSError:
            return False
    return True


def is_listening(port: int) -> bool:
    """Tell whether something accepts connections on a local port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def remove_cgroups(nodes: Iterable[str]) -> None:
    """Remove the cgroup v1 folders that slurmd leaves behind for each node."""
    for node in nodes:
        for top in Path("/sys/fs/cgroup").glob(f"*/slurm_{node}"):
            for folder, _, _ in os.walk(top, topdown=False):
                os.rmdir(folder)
