"""Rehearse the performance recipes of Megatron-Bridge 0.6 that our loop takes: how many build, and why others do not.

    python -m tests.interop.rehearse_recipes CONTAINERS VERDICTS [--ends] > events.jsonl

The files are those of `real_containers.py` and `judge_containers.py`. It needs Transformer Engine; kernels that
building a rank does not call are stand-ins. --ends: the first, a middle and the last rank of each world alone. The
table comes on standard error.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GPUS = ("h100", "b200", "b300", "gb200", "gb300")
KERNELS = ("mamba_ssm", "causal_conv1d", "fla", "fast_hadamard_transform", "deep_ep", "flash_mla", "cudnn")
KERNELS += ("emerging_optimizers",)
# Of recipes that leave it to their tokenizer, which is not downloaded
VOCAB_SIZE = 131072
# Transformer Engine reads it while it is imported; recipes that need it set it
VARIABLES = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}


def jobs(containers: Path, verdicts: Path, directory: Path, *, ends: bool) -> dict[str, list[dict[str, Any]]]:
    """Write the containers that are taken into a directory; return the jobs of each kind of GPU."""
    found = defaultdict[str, list[dict[str, Any]]](list)
    for container, verdict in zip(_lines(containers), _lines(verdicts), strict=True):
        gpu, world = verdict["gpu"], container["num_gpus"]
        if verdict["message"] is not None or gpu not in GPUS:
            continue
        file = directory / f"{container['recipe']}.yaml"
        file.write_text(re.sub(r"(?m)^  vocab_size: null$", f"  vocab_size: {VOCAB_SIZE}", container["yaml"]))
        job = {"id": container["recipe"], "config": str(file), "world": world}
        job["gpus_per_node"] = 4 if gpu.startswith("g") else 8
        found[gpu].append(job | ({"ranks": sorted({0, world // 2, world - 1})} if ends else {}))
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def rehearse(gpu: str, listed: list[dict[str, Any]], directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of the jobs for a kind of GPU."""
    file = directory / f"{gpu}.jsonl"
    file.write_text("\n".join(map(json.dumps, listed)))
    path = os.pathsep.join((str(directory), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "cloudai_mbridge.training.dry", "--jobs", str(file), "--gpu", gpu]
    env = {**os.environ, **VARIABLES, "PYTHONPATH": path}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)


def main() -> int:
    containers, verdicts = map(Path, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        shutil.copy(HERE / "absent_packages.py", directory)
        start = f"from absent_packages import stand_in_for\nstand_in_for({KERNELS!r})\n"
        (directory / "sitecustomize.py").write_text(start)
        listed = jobs(containers, verdicts, directory, ends="--ends" in sys.argv)
        refused, ranks, seconds = dict[str, str](), 0, 0.0
        for gpu, own in listed.items():
            for event in rehearse(gpu, own, directory):
                print(json.dumps(event), flush=True)
                ranks += event["event"] == "built"
                seconds += event.get("cpu_s", 0.0)
                if event["event"] == "refused":
                    refused.setdefault(event["job"], f"{event['stage']}: {event['message']}")
                if event.get("problems"):
                    refused.setdefault(event["job"], f"tiling: {event['problems'][0]}")
    total = sum(map(len, listed.values()))
    report = [f"{total - len(refused)} of {total} build, {ranks} ranks, {seconds:.0f} CPU s"]
    report += [f"{count} x {why}" for why, count in Counter(refused.values()).most_common()]
    report += [f"  {job}" for job in refused]
    print("\n".join(report), file=sys.stderr)
    return 0 if total else 1


if __name__ == "__main__":
    sys.exit(main())
