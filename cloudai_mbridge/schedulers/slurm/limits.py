"""Check of runs against a cluster, before anything is submitted: its partitions, its limits, and its file systems.

What only Slurm can decide is *not evaluated*: without accounting, behind a plugin that changes jobs, or if an option of
the system replaces the value.
"""

import math
import os
import pwd
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.errors import BadInput, ToolFailure, shown
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.models.slurm_values import format_time_limit
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.plan.launchers import MEGATRON_BRIDGE
from cloudai_mbridge.schedulers.slurm.commands import complaint_of, run_command
from cloudai_mbridge.schedulers.slurm.partitions import allowed_s

_MOUNTS = Path("/proc/self/mounts")
_SHARED = frozenset(
    (
        *("afs", "beegfs", "ceph", "cifs", "dvs", "fhgfs", "fuse.ceph", "fuse.glusterfs", "gfs2", "glusterfs", "gpfs"),
        *("lustre", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "wekafs"),
    )
)
_OF_ONE_MACHINE = frozenset(("devtmpfs", "overlay", "ramfs", "squashfs", "tmpfs"))
_OF_EVERY_MACHINE = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108
_PARTITIONS_FORMAT = "%R|%l|%s"
_NO_ANSWER = "sinfo does not answer"
_QUICK_S = 10.0
_SHORT = {"time": "-t", "nodes": "-N", "partition": "-p", "account": "-A", "qos": "-q"}
_LIMITS = ("maxwall", "maxtres", "grptres")
_ASSOCIATION = ("adminlevel", "cluster", "defaultaccount", "account", "partition", "qos", "defaultqos", *_LIMITS)
_QOS = ("name", "flags", *_LIMITS)
_ANY = ("", "ALL", "(null)", "N/A")

_Row = Mapping[str, str]  # of the accounting


def judge_output_path(output_dir: Path, mounts: str | None = None) -> str:
    """Return a line about the file system of the results: shared, probably not, or not evaluated.

    mounts: as /proc/self/mounts; None: of this machine.
    """
    path, kind = output_dir.absolute(), ""
    try:
        path = path.resolve()
        above = []  # of the longest mount point above it, the last file system mounted there
        text = _MOUNTS.read_text(errors="replace") if mounts is None else mounts
        for number, row in enumerate(line.split(" ") for line in text.splitlines()):
            if len(row) > 2:
                point = Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), row[1]))
                above += [(len(point.parts), number, row[2])] if path.is_relative_to(point) else []
        kind = max(above, default=(0, 0, ""))[2]
    except (OSError, RuntimeError):
        pass
    where = visible(str(path))
    if kind in _SHARED:
        return f"output path: {where} is on {kind}"
    if kind in _OF_ONE_MACHINE or path.is_relative_to("/proc") or any(map(path.is_relative_to, _OF_EVERY_MACHINE)):
        return (
            f"output path: warning: {where} ({kind or 'unknown file system'}) is probably local to this machine;"
            " jobs on nodes that do not see it fail; use a shared file system"
        )
    return f"output path: not evaluated: whether the nodes see {where} ({kind or 'unknown file system'})"


@dataclass(frozen=True)
class _Bound:
    """The most that somebody allows. owner: a kind and a name, such as "partition main"."""

    owner: str
    most: float
    verb: str = "allows"


def parse_partitions(text: str) -> dict[str, tuple[float, float]]:
    """Return the time limit in seconds and the nodes of a job, of each partition in sinfo's answer; inf: no limit."""
    rows = ([*line.split("|"), "", ""][:3] for line in text.splitlines())
    return {
        name: (allowed_s(limit) or math.inf, float(last) if (last := size.rpartition("-")[2]).isdigit() else math.inf)
        for name, limit, size in rows
        if name
    }


def _partitions_of(system: SlurmSystem) -> dict[str, tuple[float, float]]:
    """Return the limits of the system's partitions, as `parse_partitions`; empty without an answer."""
    try:
        known = parse_partitions(run_command("sinfo", "--all", "--noheader", f"--format={_PARTITIONS_FORMAT}").stdout)
    except ToolFailure:
        return {}
    return {name: known[name] for name in system.default_partition.split(",") if name in known}


def check_limits(system: SlurmSystem, runs: Sequence[RunPlan]) -> tuple[str, ...]:
    """Return a line for the account, the time limit and the nodes. BadInput: a run exceeds one of them."""
    config, replaced = _config(), _replaced(system, runs)
    plugins = [config[name] for name in ("JobSubmitPlugins", "CliFilterPlugins") if config.get(name, "") not in _ANY]
    partitions = _partitions_of(system)
    where = f"partition {','.join(partitions)}"
    lines, broken = list[str](), list[str]()
    access: tuple[_Row | None, _Row | None] | None = None

    def judge(name: str, check: Callable[[], str], prefix: str = "") -> None:
        """Add the line of a check. It raises ToolFailure without an answer of Slurm, BadInput at an exceeded limit."""
        try:
            lines.append(f"{name}: {check()}")
        except ToolFailure as error:
            lines.append(f"{name}: not evaluated: {error.args[0]}")
        except BadInput as error:
            broken.append(f"{prefix}{error.args[0]}")

    def is_lifted(flag: str) -> bool | None:
        """Return whether the QOS lifts a limit of the partition, None if unknown."""
        return None if access is None or (access[0] is None and "qos" in replaced) else flag in _flags_of(access[1])

    def check_account() -> str:
        nonlocal access
        account, qos = access = _access(system, config, replaced)
        if account is None:
            raise ToolFailure("Slurm enforces none")
        return account["account"] + (f", QOS {qos['name']}" if qos and qos["name"] else "")

    def check_time() -> str:
        _require_own(replaced, "time", "partition")
        if not partitions:
            raise ToolFailure(_NO_ANSWER)
        limited = [(math.inf if run.time_limit_s is None else run.time_limit_s, run) for run in runs if run.time_limit]
        if not limited:
            return "none is set; the default of the partition applies"
        asked, run = max(limited, key=lambda pair: pair[0])
        own = _Bound(where, max(time_s for time_s, _ in partitions.values()))
        lowest = _lowest(own, _bounds(*(access or (None, None)), ("maxwall",)), asked, is_lifted("PartitionTimeLimit"))
        return _verdict(run, "time_limit", asked, lowest, lambda s: str(format_time_limit(s)))

    def check_nodes() -> str:
        _require_own(replaced, "nodes", "partition")
        if not partitions:
            raise ToolFailure(_NO_ANSWER)
        run = max(runs, key=lambda run: run.num_nodes)
        own = _Bound(where, max(job_nodes for _, job_nodes in partitions.values()))
        account, qos = access or (None, None)
        fields = () if "Relative" in _flags_of(qos) else ("maxtres", "grptres")  # its limits are percentages
        others = (*_bounds(account, qos, fields), _Bound(where, _size_of(list(partitions)), "has"))
        lowest = _lowest(own, others, run.num_nodes, is_lifted("PartitionMaxNodes"))
        return _verdict(run, "num_nodes", run.num_nodes, lowest, "{:g}".format)

    judge("account", check_account, f"system {system.name!r}: account: ")
    judge("time limit", check_time)
    judge("nodes", check_nodes)
    if broken and config and not plugins:
        raise BadInput("\n".join(broken))
    plugin = f"plugin {', '.join(plugins)}" if plugins else "plugins, which are unknown,"
    changed = f"not evaluated: Slurm's {plugin} may change jobs"
    return (*lines, *(f"{text}; {changed}" for text in broken))


def _lowest(own: _Bound, others: Iterable[_Bound], asked: float, is_lifted: bool | None) -> _Bound | None:
    """Return the lowest limit, None if unlimited. own: of the partition."""
    if is_lifted is None and asked > own.most:
        raise ToolFailure(f"a QOS may lift the limit of {own.owner}, which is exceeded")
    bounds = [bound for bound in (*(() if is_lifted else (own,)), *others) if bound.most < math.inf]
    return min(bounds, key=lambda bound: bound.most, default=None)


def _verdict(run: RunPlan, key: str, asked: float, lowest: _Bound | None, form: Callable[[float], str]) -> str:
    """Return the used part of a limit; raise BadInput if it is exceeded."""

    def text(value: float) -> str:
        return "no limit" if value == math.inf else form(value)

    if lowest is None:
        return f"{text(asked)}; Slurm sets no limit"
    if asked <= lowest.most:
        return f"{text(asked)} of {text(lowest.most)} ({lowest.owner})"
    kind = lowest.owner.partition(" ")[0]
    raise BadInput(
        f"test {run.test_id!r}: {key}: {text(asked)} is more than {lowest.owner} {lowest.verb} ({text(lowest.most)});"
        f" lower it, or use another {kind}"
    )


def _require_own(replaced: Mapping[str, str], *names: str) -> None:
    for name in names:
        if name in replaced:
            raise ToolFailure(f"extra_sbatch_args replaces --{name}")


def _size_of(names: Sequence[str]) -> float:
    """Return the nodes of the largest partition, powered-down ones as well; inf if unknown."""
    try:
        rows = _partition_settings(names)
    except ToolFailure:
        return math.inf
    numbers = [row.get("TotalNodes", "") for row in rows]
    return max((float(number) if number.isdigit() else math.inf for number in numbers), default=math.inf)


def _replaced(system: SlurmSystem, runs: Iterable[RunPlan]) -> dict[str, str]:
    """Return the options of sbatch that replace the values of checks, with their values."""
    found, options = {}, list(system.extra_sbatch_args)
    for run in runs:
        if run.launcher is MEGATRON_BRIDGE:  # it passes srun's options to sbatch
            options += [text for text in (system.extra_srun_args, run.extra_srun_args) if text]
    words = [word for option in options for word in _words(option)]
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, has_value, value = word.partition("=")
        for full, short in _SHORT.items():
            if len(name) > 3 and (f"--{full}".startswith(name) or (full == "time" and name.startswith("--time"))):
                found[full] = value if has_value else following
            elif not name.startswith("--") and name.startswith(short):
                found[full] = word.removeprefix(short) or following
    return found


def _words(option: str) -> list[str]:
    try:
        return shlex.split(option)
    except ValueError:  # an open quote
        return option.split()


def _config() -> dict[str, str]:
    """Return Slurm's configuration, empty without an answer."""
    try:
        answer = run_command("scontrol", "show", "config", timeout_s=_QUICK_S)
    except ToolFailure:
        return {}
    pairs = (line.partition("=") for line in answer.stdout.splitlines() if answer.returncode == 0)
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}


def has_gpu_gres() -> bool | None:
    """Return whether Slurm has GPUs as a generic resource; None if it does not answer."""
    types = _config().get("GresTypes")
    return None if types is None else "gpu" in types


def _access(
    system: SlurmSystem, config: Mapping[str, str], replaced: Mapping[str, str]
) -> tuple[_Row | None, _Row | None]:
    """Return the rows of the jobs' account, None if Slurm enforces none, and of their QOS, with the enforced limits."""
    enforced = {word.strip().lower() for word in config.get("AccountingStorageEnforce", "").split(",")}
    if not config:
        raise ToolFailure("scontrol does not answer")
    if not enforced & {"associations", "limits", "qos", "safe", "all"}:
        return None, None
    _require_own(replaced, "partition")
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise ToolFailure(f"the user with id {os.getuid()} has no name here") from None
    cluster = config.get("ClusterName", "").lower()
    of_user = _sacctmgr("user", _ASSOCIATION, f"user={user}", f"cluster={cluster}", "withassoc")
    row = _association([each for each in of_user if each["cluster"] == cluster], user, system, replaced)
    qos = replaced.get("qos") or row["defaultqos"] or (row["qos"] if row["qos"].count(",") == 0 else "")
    if "," in qos:
        raise ToolFailure(f"Slurm chooses one of the QOS {qos}")
    every_qos = _sacctmgr("qos", _QOS)
    if enforced & {"qos", "all"} and qos:
        usable = row["qos"].lower().split(",")
        # Slurm lets operators and administrators use every existing one
        if os.getuid() == 0 or row["adminlevel"].lower() not in ("", "none"):
            usable += [each["name"] for each in every_qos]
        if qos.lower() not in usable:
            raise BadInput(
                f"QOS {shown(qos)} is not open to {user} with account {row['account']};"
                f" use one of {row['qos'].lower().replace(',', ', ')}"
            )
    _require_open(system.default_partition.split(","), row["account"], qos)
    own = next((each for each in every_qos if each["name"] == qos.lower()), None)
    if enforced & {"limits", "safe", "all"}:
        return row, own
    unlimited = dict.fromkeys(_LIMITS, "")
    return {**row, **unlimited}, own and {**own, **unlimited}


def _association(rows: Sequence[_Row], user: str, system: SlurmSystem, replaced: Mapping[str, str]) -> _Row:
    """Return the association that the jobs use: of the partition, else of all partitions."""
    wanted = replaced.get("account") or system.account or next((row["defaultaccount"] for row in rows), "")
    known = sorted({row["account"] for row in rows})
    if not known:
        raise BadInput(f"{user} has no account in Slurm, which accepts no job without one; have one added")
    of_account = [row for row in rows if row["account"] == wanted.lower()]
    if not of_account:
        raise BadInput(f"{shown(wanted)} is not an account of {user}; use one of {', '.join(known)}")
    partitions = system.default_partition.lower().split(",")
    found = [row for row in of_account if row["partition"].lower() in partitions]
    if found and len(partitions) > 1:
        raise ToolFailure(f"account {wanted} has limits of its own in partition {found[0]['partition']}")
    found += [row for row in of_account if not row["partition"]]
    if not found:
        where = ", ".join(sorted(row["partition"] for row in of_account))
        raise BadInput(
            f"{wanted} of {user} is for partition {where}, not {system.default_partition}; use one of the others"
        )
    return found[0]


def _flags_of(qos: _Row | None) -> list[str]:
    """Return the flags of a QOS, which may lift the partition's limits."""
    return qos["flags"].split(",") if qos else []


def _bounds(account: _Row | None, qos: _Row | None, fields: Iterable[str]) -> Iterator[_Bound]:
    """Yield the limit of each field that has one; one of the QOS replaces the account's."""
    owners = [(f"QOS {qos['name']}", qos)] if qos else []
    owners += [(f"account {account['account']}", account)] if account else []
    for field in fields:
        limits = (
            (owner, allowed_s(row[field]) if field == "maxwall" else _nodes_of(row[field])) for owner, row in owners
        )
        yield from [_Bound(owner, most) for owner, most in limits if most is not None][:1]


def _nodes_of(tres: str) -> float | None:
    """Return the nodes of a list such as "cpu=64,node=4", None if they are not limited."""
    values = dict(part.partition("=")[::2] for part in tres.split(","))
    return float(values["node"]) if values.get("node", "").isdigit() else None


def _require_open(names: Sequence[str], account: str, qos: str) -> None:
    """Require a partition that accepts the account and the QOS.

    A list of allowed accounts may include the accounts below them, by release: it is not evaluated. A QOS of the
    partition's own has limits that come before all others: they are not evaluated.
    """
    rows = _partition_settings(names)
    for key, value in (("Accounts", account), ("Qos", qos)):
        if rows and value and not any(_is_open(row, key, value) for row in rows):
            kind = "account" if key == "Accounts" else "QOS"
            if key == "Accounts" and any(row.get("AllowAccounts", "ALL") not in _ANY for row in rows):
                raise ToolFailure(f"partition {','.join(names)} lists other accounts than {value}")
            raise BadInput(f"partition {','.join(names)} is closed to {kind} {value}; use another of them")
    if own := [row["QoS"] for row in rows if row.get("QoS", "") not in _ANY]:
        raise ToolFailure(f"the partition's own QOS {own[0]} has limits of its own")


def _is_open(row: Mapping[str, str], key: str, value: str) -> bool:
    allowed, denied = row.get(f"Allow{key}", "ALL"), row.get(f"Deny{key}", "")
    if allowed not in _ANY:
        return value.lower() in allowed.lower().split(",")
    return denied in _ANY or value.lower() not in denied.lower().split(",")


def _partition_settings(names: Sequence[str]) -> list[dict[str, str]]:
    answer = run_command("scontrol", "--all", "--oneliner", "show", "partition", timeout_s=_QUICK_S)
    rows = [dict(word.partition("=")[::2] for word in line.split()) for line in answer.stdout.splitlines()]
    return [row for row in rows if row.get("PartitionName") in names]


def _sacctmgr(kind: str, fields: Sequence[str], *more: str) -> list[dict[str, str]]:
    argv = ("sacctmgr", "--noheader", "--parsable2", "--readonly", "show", kind, *more, f"format={','.join(fields)}")
    answer = run_command(*argv, timeout_s=_QUICK_S)
    if answer.returncode != 0:
        raise ToolFailure(f"sacctmgr failed: {complaint_of(answer)}")
    rows = (line.split("|") for line in answer.stdout.splitlines())
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]
