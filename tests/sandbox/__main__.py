"""Run a Slurm sandbox from the command line.

    python -m tests.sandbox start /tmp/sb --nodes 4 --gpus 4
    eval "$(python -m tests.sandbox env /tmp/sb)"
    python -m tests.sandbox crash /tmp/sb gb200-2
    python -m tests.sandbox stop /tmp/sb --purge

Exit codes: 0 done; 1 `status` of a sandbox that does not run; 2 it could not be done, with the reason on stderr.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields

from tests.sandbox.cluster import SlurmSandbox
from tests.sandbox.conf import SandboxSpec
from tests.sandbox.errors import SandboxError
from tests.sandbox.host import is_job_variable

PROGRAM = "python -m tests.sandbox"
NODE_COMMANDS = {
    "crash": "take the power from a node",
    "kill-slurmd": "kill a node's slurmd, its jobs go on",
    "revive": "start a dead node again",
    "resume": "return a down node to service",
}
CONTROLLER_COMMANDS = {"kill-controller": "kill slurmctld", "start-controller": "start slurmctld again"}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("directory", metavar="DIR")
        return command

    _add_start_options(add("start", "start a cluster in DIR"))
    add("env", "print what a shell needs to use the cluster, for eval")
    add("status", "print which daemons run and how the nodes are")
    add("stop", "stop the cluster, whoever started it").add_argument(
        "--purge", action="store_true", help="remove DIR and all in it"
    )
    for name, text in NODE_COMMANDS.items():
        add(name, text).add_argument("node", metavar="NODE")
    for name, text in CONTROLLER_COMMANDS.items():
        add(name, text)
    return parser


def _add_start_options(start: argparse.ArgumentParser) -> None:
    start.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    default = SandboxSpec()
    start.add_argument("--nodes", type=int, default=default.nodes, help="number of nodes")
    start.add_argument("--gpus", type=int, default=default.gpus, help="fake GPUs per node")
    start.add_argument("--gpu-type", default=default.gpu_type, help="their type in --gres=gpu:TYPE:N")
    start.add_argument("--cpus", type=int, default=default.cpus, help="CPUs per node")
    start.add_argument("--mem-mb", type=int, default=default.mem_mb, help="memory per node")
    start.add_argument("--name-prefix", default=default.name_prefix, help="node names, before the number")
    start.add_argument("--accounting", action="store_true", help="slurmdbd and a database, so that sacct works")
    start.add_argument(
        "--no-hostnames",
        dest="hostnames",
        action="store_false",
        help="no namespaces; node names then do not resolve in jobs",
    )
    start.add_argument("--cgroup", action="store_true", help="enforce memory by cgroup v1 (root)")
    start.add_argument(
        "--conf", dest="extra_conf", action="append", default=[], metavar="LINE", help="a further line of slurm.conf"
    )


def start(options: argparse.Namespace) -> int:
    """Start a cluster and say how to use it."""
    spec = {field.name: getattr(options, field.name) for field in fields(SandboxSpec)}
    SlurmSandbox(options.directory, **{**spec, "extra_conf": "\n".join(options.extra_conf)}).start()
    directory = shlex.quote(options.directory)
    idle = "1 node is" if options.nodes == 1 else f"{options.nodes} nodes are"
    print(f'{idle} idle. To use them: eval "$({PROGRAM} env {directory})"')
    print(f"To stop them: {PROGRAM} stop {directory}")
    return 0


def print_env(sandbox: SlurmSandbox) -> int:
    """Print the shell lines that point clients to the cluster, and away from any other."""
    for name in sorted(filter(is_job_variable, os.environ.keys() - sandbox.env.keys())):
        print(f"unset {name}")
    for name, value in sandbox.env.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def print_status(sandbox: SlurmSandbox) -> int:
    """Print daemons and nodes; return 1 if nothing runs."""
    daemons = sandbox.daemons()
    print(f"{sandbox.directory}: {'running' if any(daemons.values()) else 'stopped'}")
    for name, is_alive in daemons.items():
        print(f"  {name:<20} {'alive' if is_alive else 'dead'}")
    if daemons.get("slurmctld"):
        for name, state in sandbox.node_states().items():
            print(f"  {name:<20} {state}")
    return 0 if any(daemons.values()) else 1


def dispatch(options: argparse.Namespace) -> int:
    """Do what the arguments say; return the exit code."""
    if options.command == "start":
        return start(options)
    sandbox = SlurmSandbox.load(options.directory)
    if options.command == "env":
        return print_env(sandbox)
    if options.command == "status":
        return print_status(sandbox)
    if options.command == "stop":
        sandbox.stop(purge=options.purge)
    else:  # the other commands are called as the methods are
        node = [options.node] if options.command in NODE_COMMANDS else []
        getattr(sandbox, options.command.replace("-", "_"))(*node)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; bad input ends in one clear line, not in a traceback."""
    options = build_parser().parse_args(argv)
    try:
        return dispatch(options)
    except (SandboxError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
