"""All parts of one check, and the file of their results."""

import contextlib
import json
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudai_mbridge.estimate.hardware import find_gpu
from cloudai_mbridge.files.replace import write_text
from cloudai_mbridge.gpu_check import kit as parts_need
from cloudai_mbridge.gpu_check import layer_features, parity, proxy, run_features, trials
from cloudai_mbridge.gpu_check.kit import KILL_WAIT_S, TERM_WAIT_S, Device, Figures, Kit, PartFailed
from cloudai_mbridge.gpu_check.outcome import Outcome, Part, Status, run_parts
from cloudai_mbridge.gpu_check.predictions import PREDICTIONS, predictions
from cloudai_mbridge.version import __version__

VERSION = 1
TOTAL_S = 590.0  # from the start of the command to its end: under ten minutes
ENDING_S = TERM_WAIT_S + KILL_WAIT_S  # of it, to end the last command
PROBE_S = 90.0
LOGS, MOST_LOGGED = ".logs.tar.gz", 2**20


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
    counts = {status: sum(outcome.status is status for outcome in outcomes) for status in Status}
    print(f"{', '.join(f'{count} {status}' for status, count in counts.items())}; written: {out}, {out.name}{LOGS}")
    return 1 if counts[Status.FAILED] else 0


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
    facts = Kit(work, Device(), deadline).worker("probe", log="probe")
    gpu = find_gpu(facts["gpu"]) if facts["gpu"] else None
    return Device(**facts, gpu_type=gpu.name if gpu else None)


def write(out: Path, started: str, device: Device, outcomes: Sequence[Outcome]) -> None:
    """Replace the file."""
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


_GPU = (parts_need.needs_gpu,)
_KNOWN_GPU = (parts_need.needs_known_gpu,)
_ENGINE = (*_GPU, parts_need.needs_transformer_engine)
PARTS = (
    Part(proxy.MATMUL, "measured peak of a bf16 matrix product", 30, proxy.matmul, _GPU),
    Part(parity.REFERENCE, "the tiny recipes in fp32 on the CPU", 80, parity.cpu_reference),
    Part("tiny_fp32", "the same on the GPU: loss parity with the CPU", 120, parity.tiny_fp32, _GPU),
    Part(proxy.PROXY, "an 8B-shaped model of 4 layers in bf16", 60, proxy.proxy, _GPU),
    Part(PREDICTIONS, "memory and step time, predicted and measured at ten points", 250, predictions, _KNOWN_GPU),
    Part("without_transformer_engine", "the proxy on local layers", 60, proxy.without_transformer_engine, _GPU),
    Part("fp8_current", "the proxy in FP8 with current scaling", 60, trials.fp8_current, _ENGINE),
    Part("fp8_delayed", "the same with delayed scaling", 60, trials.fp8_delayed, _ENGINE),
    Part("fp8_blockwise", "the same with scales of blocks", 60, trials.fp8_blockwise, _ENGINE),
    Part("graphs_local", "the proxy with CUDA graphs of each layer", 60, trials.graphs_local, _GPU),
    Part("graphs_engine", "the same with those of Transformer Engine", 60, trials.graphs_engine, _ENGINE),
    Part("graphs_iteration", "the same with one graph of an iteration", 60, trials.graphs_iteration, _GPU),
    Part("op_fuser", "the proxy of Transformer Engine's fused operations", 60, trials.op_fuser, _ENGINE),
    Part("megatron_fsdp", "the proxy sharded by Megatron-FSDP", 60, trials.megatron_fsdp, _GPU),
    Part("optimizer_offload", "the proxy with optimizer state on the host", 60, trials.optimizer_offload, _ENGINE),
    Part("muon", "the proxy with distributed Muon", 60, trials.muon, (parts_need.needs_muon,)),
    Part("activation_offload", "the proxy with activations on the host", 60, trials.activation_offload, _ENGINE),
    Part("recomputation", "the proxy with recomputed modules", 60, layer_features.recomputation, _GPU),
    Part("expert_capacity", "grouped experts without and with a size", 90, layer_features.expert_capacity, _GPU),
    Part("distributed_optimizer", "with it and without it: the same losses", 80, proxy.distributed_optimizer),
    Part("checkpoint", "save, resume, the same losses", 80, run_features.checkpoint),
    Part("loop_overhead", "the loop against a bare Megatron-Core step", 90, loop_overhead),
    Part("tiny_bf16", "the tiny recipes on the GPU in bf16", 120, parity.tiny_bf16, _GPU),
    Part("profile", "a trace, and a snapshot of the GPU's memory", 60, run_features.profile),
    Part("line", "verify, plan, run, report, promote, gate", 180, run_features.line),
)
