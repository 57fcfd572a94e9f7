"""All parts of one check, and the file that holds what they found."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudai_mbridge.estimate.hardware import find_gpu
from cloudai_mbridge.files.replace import write_text
from cloudai_mbridge.gpu_check.kit import KILL_WAIT_S, TERM_WAIT_S, Device, Kit, PartFailed
from cloudai_mbridge.gpu_check.outcome import Outcome, Part, Status, run_parts
from cloudai_mbridge.gpu_check.plan import PARTS
from cloudai_mbridge.version import __version__

VERSION = 1
TOTAL_S = 590.0  # from the start of the command to its end: under ten minutes
ENDING_S = TERM_WAIT_S + KILL_WAIT_S  # of it, to end the last command
PROBE_S = 90.0


def run(out: Path, work: Path, only: Sequence[str] | None, patience: float, started: float) -> int:
    """Run the parts; return the exit code. started: when the command was, on the monotonic clock."""
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
    print(f"{', '.join(f'{count} {status}' for status, count in counts.items())}; written: {out}")
    return 1 if counts[Status.FAILED] else 0


def run_and_write(parts: Sequence[Part], kit: Kit, out: Path, end: float, patience: float = 1.0) -> list[Outcome]:
    """Run the parts; the file is whole after each of them, whatever ends this process."""
    outcomes: list[Outcome] = []
    started = datetime.now(UTC).isoformat(timespec="seconds")
    write(out, started, kit.device, outcomes)
    for outcome in run_parts(parts, kit, end, patience):
        outcomes.append(outcome)
        write(out, started, kit.device, outcomes)
        print(f"{outcome.status:8}{outcome.name:28}{outcome.duration_s:6.1f} s  {outcome.reason}", flush=True)
    return outcomes


def probe(work: Path, deadline: float) -> Device:
    """Ask a process of its own, so that this one holds no memory of the GPU."""
    facts = Kit(work, Device(), deadline).worker("probe", log="probe")
    gpu = find_gpu(facts["gpu"]) if facts["gpu"] else None
    return Device(
        gpu=facts["gpu"],
        no_gpu=facts["no_gpu"],
        has_nvidia_smi=facts["has_nvidia_smi"],
        gpu_type=gpu.name if gpu else None,
        memory_gib=facts["memory_gib"],
        no_transformer_engine=facts["no_transformer_engine"],
        packages={**facts["packages"], "cuda": facts["cuda"]},
    )


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
