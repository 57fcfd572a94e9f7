"""All parts of one check, and the file of their results."""

import contextlib
import json
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from cloudai_mbridge.estimate.hardware import find_gpu
from cloudai_mbridge.files.replace import write_text
from cloudai_mbridge.gpu_check import proxy, tiny
from cloudai_mbridge.gpu_check.kit import KILL_WAIT_S, MUON, TERM_WAIT_S, Device, Figures, Kit, PartFailed, PartSkipped
from cloudai_mbridge.version import __version__

VERSION = 1
TOTAL_S = 590.0  # from the start of the command to its end: under ten minutes
ENDING_S = TERM_WAIT_S + KILL_WAIT_S  # of it, to end the last command
PROBE_S = 90.0
LOGS, MOST_LOGGED = ".logs.tar.gz", 2**20

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Part:
    """A check. run: takes the kit, returns figures. budget_s: its processes are ended then."""

    name: str
    budget_s: float
    run: Callable[[Kit], Figures]
    need: Callable[[Kit], None] | None = None  # raises PartSkipped


@dataclass(frozen=True)
class Outcome:
    """Result of a part. reason: empty if it passed."""

    name: str
    status: Status
    reason: str = ""
    duration_s: float = 0.0
    figures: Figures = field(default_factory=dict)


def run_parts(parts: Sequence[Part], kit: Kit, end: float, patience: float = 1.0) -> Iterator[Outcome]:
    """Run the parts in order and yield each outcome.

    end: on the monotonic clock; no part starts after it, and all commands are ended at it. patience: factor on the
    budgets, for a machine that is slow or busy.
    """
    for part in parts:
        start = time.monotonic()
        if start >= end:
            yield Outcome(part.name, "skipped", "the time of all parts is used up")
            continue
        kit.deadline = min(start + part.budget_s * patience, end)
        status: Status = "failed"
        reason, figures = "", {}
        try:
            if part.need is not None:
                part.need(kit)
            figures = part.run(kit)
            status = "passed"
        except PartSkipped as error:
            status, reason = "skipped", str(error)
        except PartFailed as error:
            reason, figures = str(error), error.figures
        except Exception as error:  # a defect of one part must not stop the others
            reason = f"{type(error).__name__}: {error}"
        yield Outcome(part.name, status, " ".join(reason.split())[:1000], time.monotonic() - start, figures)


def needs_gpu(kit: Kit) -> None:
    """Require a GPU that torch can use; if nvidia-smi exists, a missing GPU is a failure."""
    if kit.device.gpu is not None:
        return
    if kit.device.has_nvidia_smi:
        raise PartFailed(f"{kit.device.no_gpu}, although this machine has nvidia-smi")
    raise PartSkipped(kit.device.no_gpu)


def needs_known_gpu(kit: Kit) -> None:
    needs_gpu(kit)
    if kit.device.gpu_type is None:
        raise PartSkipped(f"no estimates for {kit.device.gpu}")


def needs_muon(kit: Kit) -> None:
    needs_gpu(kit)
    if kit.device.packages.get(MUON) is None:
        raise PartSkipped(f"no {MUON}: pip install 'cloudai-mbridge[emerging]'")


def needs_transformer_engine(kit: Kit) -> None:
    needs_gpu(kit)
    if kit.device.no_transformer_engine:
        raise PartSkipped(f"no Transformer Engine: {kit.device.no_transformer_engine}")


def run(out: Path, work: Path, only: Sequence[str] | None, patience: float, started: float) -> int:
    """Run the parts; return the exit code. started: start time of the command, on the monotonic clock."""
    names = [part.name for part in PARTS]
    if unknown := [name for name in only or () if name not in names]:
        print(f"error: --only {unknown[0]}: no such part; use one of {', '.join(names)}", file=sys.stderr)
        return 2
    try:
        kit = Kit(work, probe(work, started + PROBE_S * patience))
    except PartFailed as error:
        print(f"error: the machine cannot be probed: {error}", file=sys.stderr)
        return 2
    parts = [part for part in PARTS if not only or part.name in only]
    outcomes = run_and_write(parts, kit, out, started + TOTAL_S * patience - ENDING_S, patience)
    ends = [outcome.status for outcome in outcomes]
    counts = {status: ends.count(status) for status in get_args(Status)}
    print(f"{', '.join(f'{count} {status}' for status, count in counts.items())}; written: {out}, {out.name}{LOGS}")
    return 1 if counts["failed"] else 0


def run_and_write(parts: Sequence[Part], kit: Kit, out: Path, end: float, patience: float = 1.0) -> list[Outcome]:
    """Run the parts; the file and the logs are complete after each part, even if this process is killed."""
    outcomes: list[Outcome] = []
    started = datetime.now(UTC).isoformat(timespec="seconds")
    write(out, started, kit.device, outcomes)
    for outcome in run_parts(parts, kit, end, patience):
        outcomes.append(outcome)
        write(out, started, kit.device, outcomes)
        pack_logs(kit.work, out)
        print(f"{outcome.status:8}{outcome.name:28}{outcome.duration_s:6.1f} s  {outcome.reason}", flush=True)
    return outcomes


def probe(work: Path, deadline: float) -> Device:
    """Probe in a separate process, so that this process holds no memory of the GPU."""
    facts = Kit(work, Device(), deadline).worker("machine", "probe", log="probe")
    gpu = find_gpu(facts["gpu"]) if facts["gpu"] else None
    return Device(**facts, gpu_type=gpu.name if gpu else None)


def write(out: Path, started: str, device: Device, outcomes: Sequence[Outcome]) -> None:
    data: dict[str, Any] = {
        "version": VERSION,
        "tool": {"name": "cloudai-mbridge", "version": __version__},
        "started_at": started,
        "device": {**asdict(device), "python": sys.version.split()[0]},
        "parts": {outcome.name: asdict(outcome) for outcome in outcomes},
    }
    write_text(out, json.dumps(data, indent=1) + "\n")


def pack_logs(work: Path, out: Path) -> None:
    """Replace OUT.logs.tar.gz, next to the file: the commands' output, without checkpoints and traces."""
    archive = out.with_name(out.name + LOGS)
    with tarfile.open(archive.with_name(archive.name + ".new"), "w:gz") as tar:
        for path in sorted(work.rglob("*")):
            if path.is_file() and path.stat().st_size <= MOST_LOGGED and "checkpoint" not in path.parts:
                with contextlib.suppress(OSError):  # a process that is being ended removes its files
                    tar.add(path, path.relative_to(work))
    archive.with_name(archive.name + ".new").replace(archive)


def loop_overhead(kit: Kit) -> Figures:
    """Compare a step of the loop with a bare Megatron-Core step."""
    steps = "6" if kit.device.gpu is None else "21"
    return kit.worker("overhead", "--rounds", "3", "--steps", steps, log="loop_overhead")


PARTS = (
    Part(proxy.MATMUL, 30, proxy.matmul, needs_gpu),
    Part(tiny.REFERENCE, 80, tiny.cpu_reference),
    Part("tiny_fp32", 120, tiny.tiny_fp32, needs_gpu),
    Part(proxy.PROXY, 60, proxy.proxy, needs_gpu),
    Part(proxy.PREDICTIONS, 250, proxy.predictions, needs_known_gpu),
    Part("without_transformer_engine", 60, proxy.without_transformer_engine, needs_gpu),
    Part("fp8_current", 60, partial(proxy.fp8, "fp8_current"), needs_transformer_engine),
    Part("fp8_delayed", 60, partial(proxy.fp8, "fp8_delayed"), needs_transformer_engine),
    Part("fp8_blockwise", 60, partial(proxy.fp8, "fp8_blockwise"), needs_transformer_engine),
    Part("graphs_local", 60, partial(proxy.feature, "graphs_local"), needs_gpu),
    Part("graphs_engine", 60, partial(proxy.feature, "graphs_engine"), needs_transformer_engine),
    Part("graphs_iteration", 60, partial(proxy.feature, "graphs_iteration"), needs_gpu),
    Part("op_fuser", 60, partial(proxy.feature, "op_fuser"), needs_transformer_engine),
    Part("megatron_fsdp", 60, partial(proxy.feature, "megatron_fsdp"), needs_gpu),
    Part("optimizer_offload", 60, partial(proxy.feature, "optimizer_offload"), needs_transformer_engine),
    Part("muon", 60, proxy.muon, needs_muon),
    Part("activation_offload", 60, partial(proxy.feature, "activation_offload"), needs_transformer_engine),
    Part("recomputation", 60, proxy.recomputation, needs_gpu),
    Part("expert_capacity", 90, proxy.expert_capacity, needs_gpu),
    Part("distributed_optimizer", 80, proxy.distributed_optimizer),
    Part("checkpoint", 80, tiny.checkpoint),
    Part("loop_overhead", 90, loop_overhead),
    Part("tiny_bf16", 120, tiny.tiny_bf16, needs_gpu),
    Part("profile", 60, tiny.profile),
    Part("line", 180, tiny.line),
)
