"""Render the configuration files of a sandbox: values in, text out.

Slurm's own documentation of every key: slurm.conf(5), gres.conf(5), cgroup.conf(5), slurmdbd.conf(5).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.sandbox.errors import SandboxError
from tests.sandbox.layout import SandboxLayout


@dataclass(frozen=True)
class SandboxSpec:
    """Say what the cluster looks like to its users.

    `gpus`, `cpus` and `mem_mb` are per node and need not exist on this machine.  `hostnames` gives every node a
    hostname and /etc/hosts of its own (Linux namespaces), so that node names resolve inside jobs.  `accounting` adds
    slurmdbd and a database, so that sacct works.  `cgroup` enforces memory limits by the kernel (root, cgroup v1).
    `extra_conf` is appended to slurm.conf; of a repeated key, Slurm takes the last.

    A `name_prefix` such as "127.0.1." makes the node names addresses, which resolve without namespaces.
    """

    nodes: int = 2
    gpus: int = 4
    gpu_type: str = "gb200"
    name_prefix: str = "gb200-"
    cpus: int = 8
    mem_mb: int = 16000
    accounting: bool = False
    hostnames: bool = True
    cgroup: bool = False
    extra_conf: str = ""

    def __post_init__(self) -> None:
        """Refuse a cluster that Slurm would refuse later and less clearly."""
        for name, low in (("nodes", 1), ("gpus", 0), ("cpus", 1), ("mem_mb", 1)):
            if (value := getattr(self, name)) < low:
                raise SandboxError(f"{name}: {value} is too small; use at least {low}")
        for name in ("name_prefix", "gpu_type"):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}", value := getattr(self, name)):
                raise SandboxError(f"{name}: {value!r} is not a name; use letters, digits and . _ -, at most 41")

    @property
    def node_names(self) -> list[str]:
        """List the nodes' names, in order."""
        return [f"{self.name_prefix}{number}" for number in range(1, self.nodes + 1)]


@dataclass(frozen=True)
class Site:
    """Say what the configuration takes from this machine and this start of the sandbox.

    `ports` are those of slurmctld, slurmdbd, and then one per node: several slurmd on one host need one each.
    """

    layout: SandboxLayout
    ports: tuple[int, ...]
    user: str
    slurm_version: tuple[int, int]


def render_files(spec: SandboxSpec, site: Site, machine_hosts: str = "") -> Mapping[str, str]:
    """Return the text of every configuration file by its name in the sandbox directory."""
    files = {
        "slurm.conf": render_slurm_conf(spec, site),
        "gres.conf": render_gres_conf(spec, site.layout),
        "cgroup.conf": render_cgroup_conf(spec, site.slurm_version),
        "hosts": render_hosts(spec, machine_hosts),
    }
    if spec.accounting:
        files["slurmdbd.conf"] = render_slurmdbd_conf(site)
    return files


def render_slurm_conf(spec: SandboxSpec, site: Site) -> str:
    """Return slurm.conf."""
    sections = (
        _identity(site),
        _files(site.layout),
        _tracking(spec),
        _resources(spec),
        _timing(),
        _accounting(spec, site),
        _nodes(spec, site.ports[2:]),
        spec.extra_conf.strip(),
    )
    return "\n\n".join(section for section in sections if section) + "\n"


def _identity(site: Site) -> str:
    # A private munged authenticates; auth/none would let anyone on localhost run code as this user.
    # cred_expire (s) is also the delay before a requeued job starts again, 121 s by default.
    return f"""\
ClusterName=sandbox
SlurmctldHost=localhost
SlurmctldPort={site.ports[0]}
SlurmUser={site.user}
SlurmdUser={site.user}
AuthType=auth/munge
AuthInfo=socket={site.layout.munge_socket},cred_expire=5
MailProg=/bin/true"""


def _files(layout: SandboxLayout) -> str:
    return f"""\
StateSaveLocation={layout.directory}/state
SlurmdSpoolDir={layout.spool("%n")}
SlurmctldPidFile={layout.directory}/run/slurmctld.pid
SlurmdPidFile={layout.directory}/run/slurmd-%n.pid
SlurmctldLogFile={layout.logs}/slurmctld.log
SlurmdLogFile={layout.logs}/slurmd-%n.log"""


def _tracking(spec: SandboxSpec) -> str:
    if spec.cgroup:
        return "ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup\nJobAcctGatherType=jobacct_gather/linux"
    # OverMemoryKill works without root; the job's state is then FAILED, not OUT_OF_MEMORY. UsePss: what processes
    # share, such as torch's libraries, counts once.
    return """\
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill,UsePss"""


def _resources(spec: SandboxSpec) -> str:
    # DefMemPerCPU: without it one job takes all of a node's memory, and a second never starts beside it.
    # Its default is twice what a small training takes.
    # config_overrides: believe this file and not the hardware, which may have fewer CPUs.
    return f"""\
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU={max(1, spec.mem_mb // spec.cpus)}
GresTypes=gpu
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=1"""


# Where no node is meant to fail: a busy machine stalls for longer than the sandbox's own 6 s
PATIENT = "SlurmdTimeout=300"


def _timing() -> str:
    # Seconds where production says minutes: a dead node is noticed within a test.
    # bf_interval: a new controller's first batch job starts with its first backfill; it reads the other intervals only
    # after three seconds.
    return """\
SlurmdTimeout=6
MessageTimeout=3
KillWait=2
MinJobAge=3600
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1"""


def _accounting(spec: SandboxSpec, site: Site) -> str:
    if not spec.accounting:
        return "AccountingStorageType=accounting_storage/none"
    # AccountingStoragePass: the connection to slurmdbd does not take its munge socket from AuthInfo.
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={site.ports[1]}
AccountingStoragePass={site.layout.munge_socket}
AccountingStorageTRES=gres/gpu"""


def _nodes(spec: SandboxSpec, ports: tuple[int, ...]) -> str:
    gres = f" Gres=gpu:{spec.gpu_type}:{spec.gpus}" if spec.gpus else ""
    nodes = (
        f"NodeName={name} NodeHostname={name if spec.hostnames else 'localhost'} NodeAddr={address} Port={port}"
        for name, address, port in zip(spec.node_names, node_addresses(spec), ports, strict=True)
    )
    return "\n".join(
        (
            f"NodeName=DEFAULT CPUs={spec.cpus} RealMemory={spec.mem_mb}{gres} State=UNKNOWN",
            *nodes,
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        )
    )


def node_addresses(spec: SandboxSpec) -> list[str]:
    """List the nodes' addresses, all on the loopback interface."""
    if spec.name_prefix[0].isdigit():
        return spec.node_names
    if not spec.hostnames:
        return ["127.0.0.1"] * spec.nodes
    return [f"127.0.{1 + index // 250}.{1 + index % 250}" for index in range(spec.nodes)]


def render_gres_conf(spec: SandboxSpec, layout: SandboxLayout) -> str:
    """Return gres.conf; Slurm discards a GPU without `File=`, and one whose type is not in slurm.conf as well."""
    if not spec.gpus:
        return ""
    return f"Name=gpu Type={spec.gpu_type} File={layout.gpu_device(f'[0-{spec.gpus - 1}]')}\n"


def render_cgroup_conf(spec: SandboxSpec, slurm_version: tuple[int, int]) -> str:
    """Return cgroup.conf.

    slurmd loads a cgroup plugin even where nothing uses one, and cgroup/v2 dies without systemd or root.  cgroup/v1
    is inert until it is used; Slurm 24.05 brought "disabled" for this.
    """
    if spec.cgroup:
        return "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\nConstrainSwapSpace=yes\nAllowedSwapSpace=0\n"
    return f"CgroupPlugin={'disabled' if slurm_version >= (24, 5) else 'cgroup/v1'}\n"


def render_hosts(spec: SandboxSpec, machine_hosts: str = "") -> str:
    """Return the nodes' /etc/hosts: the nodes, then what the machine itself knows."""
    nodes = (f"{address} {name}" for name, address in zip(spec.node_names, node_addresses(spec), strict=True))
    return "\n".join(("127.0.0.1 localhost", *nodes, machine_hosts.strip())).rstrip() + "\n"


def render_slurmdbd_conf(site: Site) -> str:
    """Return slurmdbd.conf; slurmdbd insists that only its user can read it."""
    return f"""\
DbdHost=localhost
DbdPort={site.ports[1]}
SlurmUser={site.user}
AuthType=auth/munge
AuthInfo=socket={site.layout.munge_socket}
LogFile={site.layout.logs}/slurmdbd.log
PidFile={site.layout.directory}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={site.user}
StorageLoc=slurm_acct_db
"""
