"""Rehearse the performance recipes of Megatron-Bridge 0.6 that our loop takes: how many build, and why others do not.

    python -m tests.interop.rehearse_recipes CONTAINERS VERDICTS [--ranks ends] > events.jsonl

The files are those of `real_containers.py` and `judge_containers.py`. It needs Transformer Engine; kernels that
building a rank does not call are stand-ins. The table comes on standard error.
"""

import argparse
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

import yaml

from cloudai_mbridge.training.dry.places import Layout

HERE = Path(__file__).parent
GPUS = ("h100", "b200", "b300", "gb200", "gb300")
KERNELS = ("mamba_ssm", "causal_conv1d", "fla", "fast_hadamard_transform", "deep_ep", "flash_mla", "cudnn")
# Of recipes that leave it to their tokenizer, which is not downloaded
VOCAB_SIZE = 131072
# Transformer Engine reads it while it is imported; recipes that need it set it
VARIABLES = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}


# What decides which pass runs when, and what is sent between
_STRUCTURE = ("num_layers", "hidden_size", "num_moe_experts", "moe_router_topk", "mtp_num_layers", "seq_length")
_STRUCTURE += ("pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size", "sequence_parallel")
_STRUCTURE += ("microbatch_group_size_per_vp_stage", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
_STRUCTURE += ("recompute_granularity", "expert_model_parallel_size", "expert_tensor_parallel_size")
_STRUCTURE += ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")


def structure(world: int, config: dict[str, Any]) -> str:
    """Return what recipes have in common whose ranks communicate alike: all but number formats and kernels."""
    model, ddp, train = config["model"], config["ddp"], config["train"]
    own = [model.get(name) for name in _STRUCTURE]
    own += [ddp.get(name) for name in ("use_megatron_fsdp", "overlap_grad_reduce", "overlap_param_gather")]
    own += [train["micro_batch_size"], train["global_batch_size"], config.get("peft") is None]
    return json.dumps([world, model["_target_"], *own], default=str)


def stages(world: int, config: dict[str, Any]) -> list[int]:
    """Return the first rank of every pipeline stage."""
    model = config["model"]
    tp, cp, pp = (model.get(f"{name}_parallel_size") or 1 for name in ("tensor_model", "context", "pipeline_model"))
    order = ("tp", "cp", "pp", "dp") if config["dist"].get("use_tp_pp_dp_mapping") else ("tp", "cp", "dp", "pp")
    layout = Layout(tp, cp, pp, world // (tp * cp * pp), 1, 1, order)
    return [layout.rank_of(pp=stage) for stage in range(pp)]


def jobs(
    containers: Path, verdicts: Path, directory: Path, args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Write the containers that are taken into a directory; return the jobs of each kind of GPU."""
    found, known = defaultdict[str, list[dict[str, Any]]](list), set[str]()
    for container, verdict in zip(_lines(containers), _lines(verdicts), strict=True):
        gpu, world = verdict["gpu"], container["num_gpus"]
        if verdict["message"] is not None or gpu not in GPUS:
            continue
        if args.one_of_each or args.ranks == "stages":
            config = yaml.safe_load(container["yaml"])
            kind = structure(world, config)
            if args.one_of_each and kind in known:
                continue
            known.add(kind)
        file = directory / f"{container['recipe']}.yaml"
        file.write_text(re.sub(r"(?m)^  vocab_size: null$", f"  vocab_size: {VOCAB_SIZE}", container["yaml"]))
        job = {"id": container["recipe"], "config": str(file), "world": world}
        job["gpus_per_node"] = 4 if gpu.startswith("g") else 8
        if args.ranks == "ends":
            job["ranks"] = sorted({0, world // 2, world - 1})
        elif args.ranks == "stages":
            job["ranks"] = stages(world, config)
        found[gpu].append(job)
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def rehearse(gpu: str, level: str, listed: list[dict[str, Any]], directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of the jobs for a kind of GPU."""
    file = directory / f"{gpu}.jsonl"
    file.write_text("\n".join(map(json.dumps, listed)))
    path = os.pathsep.join((str(directory), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "cloudai_mbridge.training.dry", "--jobs", str(file), "--gpu", gpu]
    command += ["--level", level]
    env = {**os.environ, **VARIABLES, "PYTHONPATH": path}
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdout is not None
        count = 0
        for line in process.stdout:
            count += 1
            yield json.loads(line)
        if process.wait() not in (0, 1) or not count:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said.read()[-3000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("containers", type=Path)
    parser.add_argument("verdicts", type=Path)
    parser.add_argument("--level", choices=("states", "step"), default="states")
    parser.add_argument("--ranks", choices=("distinct", "ends", "stages"), default="distinct")
    parser.add_argument(
        "--one-of-each", action="store_true", help="of recipes whose ranks communicate alike, the first"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for module in ("absent_packages.py", "gated_norm.py"):
            shutil.copy(HERE / module, directory)
        start = f"from absent_packages import provide, stand_in_for\nstand_in_for({KERNELS!r})\n"
        start += 'provide("mamba_ssm.ops.triton.layernorm_gated.RMSNorm", "gated_norm")\n'
        (directory / "sitecustomize.py").write_text(start)
        listed = jobs(args.containers, args.verdicts, directory, args)
        refused, ended = dict[str, str](), defaultdict[str, Counter[str]](Counter)
        seconds, not_stepped = Counter[str](), dict[str, str]()
        for gpu, own in listed.items():
            for event in rehearse(gpu, args.level, own, directory):
                print(json.dumps(event), flush=True)
                kind, job = event["event"], event.get("job", "")
                ended[kind][job] += 1
                seconds[kind] += event.get("step_cpu_s", event.get("cpu_s", 0.0))
                if kind == "refused":
                    refused.setdefault(job, f"{event['stage']}: {event['message']}")
                if kind == "not_stepped":
                    not_stepped.setdefault(job, f"{event['stage']}: {event['message']}")
                if event.get("problems"):
                    refused.setdefault(job, f"tiling: {event['problems'][0]}")
                if kind == "hang":
                    refused.setdefault(job, f"hang: {event['reason']}")
    total = sum(map(len, listed.values()))
    report = [f"{total - len(refused)} of {total} build, {ended['built'].total()} ranks, {seconds['built']:.0f} CPU s"]
    if args.level == "step":
        report += [f"{len(ended['matched'])} match, {len(ended['hang'])} hang, {len(not_stepped)} take no step"]
        report += [f"{ended['step'].total()} ranks take a step, {seconds['step']:.0f} CPU s"]
    for found in (refused, not_stepped):
        report += [f"{count} x {why}" for why, count in Counter(found.values()).most_common()]
        report += [f"  {job}" for job in found]
    print("\n".join(report), file=sys.stderr)
    return 0 if total else 1


if __name__ == "__main__":
    sys.exit(main())
