"""The daemons' command lines: values in, argv out.

Every daemon runs in the foreground, so that the process which was started is the process to stop.
"""

import sys
from pathlib import Path

from tests.sandbox.host import ENTER_NODE, find_program
from tests.sandbox.layout import SandboxLayout

SUPERVISOR = Path(__file__).with_name("node.py")


def munged_argv(layout: SandboxLayout) -> list[str]:
    """Return the command of the private munged; --force accepts a directory below /tmp."""
    folder = layout.munge
    return [
        *(find_program("munged"), "--foreground", "--force", "--num-threads=4"),
        *(f"--key-file={folder}/munge.key", f"--socket={layout.munge_socket}", f"--pid-file={folder}/munged.pid"),
        *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
    ]


def slurmctld_argv(layout: SandboxLayout) -> list[str]:
    """Return the command of the controller; -i goes on after errors in the state of an earlier start."""
    return [find_program("slurmctld"), "-D", "-i", "-f", str(layout.slurm_conf)]


def node_argv(layout: SandboxLayout, node: str, *, namespaces: list[str], parent: int) -> list[str]:
    """Return the command of a node's supervisor.

    `namespaces` is the command that enters the node's namespaces, empty for none; `parent` the pid to die with, or 0.
    """
    # -d: the compiled-in path of slurmstepd may be another installation's
    slurmd = [find_program("slurmd"), "-D", "-f", str(layout.slurm_conf), "-N", node, "-d", find_program("slurmstepd")]
    python = [sys.executable, "-I", "-S", str(SUPERVISOR), str(parent), str(layout.node_status(node))]
    enter = [*namespaces, "sh", "-c", ENTER_NODE, node, str(layout.hosts)] if namespaces else []
    return [*enter, *python, *slurmd]


def _mariadb_options(layout: SandboxLayout, user: str) -> list[str]:
    # --no-defaults must come first; it keeps the machine's own database out of this
    return ["--no-defaults", f"--datadir={layout.mysql_data}", f"--user={user}", "--innodb-log-file-size=8M"]


def mariadb_install_argv(layout: SandboxLayout, user: str) -> list[str]:
    """Return the command that creates the accounting database's files."""
    return [
        *(find_program("mariadb-install-db"), *_mariadb_options(layout, user), "--skip-test-db"),
        *("--auth-root-authentication-method=socket", f"--auth-root-socket-user={user}"),
    ]


def mariadbd_argv(layout: SandboxLayout, user: str) -> list[str]:
    """Return the command of the accounting database; slurmdbd asks for the long lock timeout."""
    return [
        *(find_program("mariadbd"), *_mariadb_options(layout, user), "--skip-networking"),
        *(f"--socket={layout.mysql_socket}", f"--pid-file={layout.directory}/run/mariadbd.pid"),
        *("--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0"),
    ]


def mariadb_grant_argv(layout: SandboxLayout, user: str) -> list[str]:
    """Return the command that lets the user's slurmdbd use the database; it fails until the database is up."""
    grant = f"CREATE DATABASE IF NOT EXISTS slurm_acct_db; GRANT ALL ON slurm_acct_db.* TO '{user}'@'localhost'"
    return [find_program("mariadb"), "--no-defaults", f"--socket={layout.mysql_socket}", "-u", user, "-e", grant]


def slurmdbd_argv() -> list[str]:
    """Return the command of slurmdbd, which finds its configuration beside SLURM_CONF."""
    return [find_program("slurmdbd"), "-D"]
