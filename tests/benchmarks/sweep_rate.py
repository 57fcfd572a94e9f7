"""Points per second of expansion plus all rules on a grid of a million points, peak memory; and with estimates.

    python tests/benchmarks/sweep_rate.py [POINTS [ESTIMATED]]

The baseline, named in the output, is the plain way in the same process: validate each point and run every rule.
ESTIMATED points (100,000) of each of three grids are gone through as `mbridge sweep plan` does it, without and with
estimates. Times are CPU times.
"""

import itertools
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.constraints import Violation, check
from cloudai_mbridge.estimate.headline import DEFAULT_LIMIT
from cloudai_mbridge.models.cmd_args import MegatronBridgeCmdArgs, ResolvedCmdArgs
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.models.test_definition import SweepConfig, TestDefinition
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.recipes.apply import with_recipe_defaults
from cloudai_mbridge.sweep.checked import checked_points
from cloudai_mbridge.sweep.estimated import SweepEstimates
from cloudai_mbridge.sweep.expand import SweepSpace, build_grid, find_axes
from cloudai_mbridge.sweep.screen import RuleScreen

AXES = {
    "tp": [1, 2, 3, 4, 8],
    "pp": [1, 2, 4, 8],
    "cp": [1, 2, 4, 8],
    "vp": [1, 2, 4, 5],
    "mb": [1, 2, 4],
    "gb": [64, 128, 256, 384, 512],
    "num_gpus": [64, 128, 256, 512],
    "cuda_graph_impl": ["none", "local", "transformer_engine"],
    "cuda_graph_scope": ["", "attn", "full_iteration"],
    "recompute_modules": ["core_attn", "mlp", "layernorm,mlp", "attention"],
    "seq_length": [4096, 8192],
}
GRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "as above": ("llama3_70b", AXES),
    "dense": (
        "llama3_70b",
        {
            "compute_dtype": ["bf16", "fp8_cs", "fp8_mx", "nvfp4"],
            "num_gpus": [64, 128, 192, 256, 512],
            "tp": [1, 2, 4, 8],
            "pp": [1, 2, 4, 8],
            "cp": [1, 2, 4],
            "mb": [1, 2, 4],
            "gb": [384, 768, 1536],
            "seq_length": list(range(1024, 17408, 1024)),
        },
    ),
    "experts": (
        "qwen3_235b_a22b",
        {
            "compute_dtype": ["bf16", "fp8_mx"],
            "num_gpus": [256, 512, 1024],
            "tp": [1, 2, 4],
            "pp": [4, 8],
            "cp": [1, 2],
            "ep": [8, 16, 32, 64],
            "mb": [1, 2, 4],
            "gb": [1024, 2048, 4096],
            "seq_length": list(range(1024, 43008, 1024)),
        },
    ),
}


def main(points: int) -> None:
    args = MegatronBridgeCmdArgs(launcher="megatron_bridge", model_recipe_name="llama3_70b", max_steps=50, **AXES)
    definition = TestDefinition(name="bench", description="", cmd_args=args)
    run = TestRun(id="bench", test_name="bench")
    system = SlurmSystem(
        name="c", scheduler="slurm", default_partition="p", partitions=[{"name": "p"}], gpus_per_node=8
    )
    recipe = load_recipe("llama3_70b")
    base = ResolvedCmdArgs(launcher="megatron_bridge", model_recipe_name="llama3_70b", max_steps=50)
    base = base.model_copy(update={name: None for name in AXES if name != "num_gpus"})
    grid = build_grid(find_axes(definition, run), SweepConfig(), "bench")
    print(f"grid: {grid.size} points over {len(AXES)} axes; the first {min(points, grid.size)} are taken")

    start = time.process_time()
    screen = RuleScreen(grid, with_recipe_defaults(base, recipe), system, recipe)
    counts: Counter[str] = Counter()
    total = accepted = 0
    for values in itertools.islice(grid, points):
        total += 1
        broken = [answer.rule_id for answer in screen.check(values) if type(answer) is Violation]
        accepted += not broken
        counts.update(broken)
    fast = total / (time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    start = time.process_time()
    plain = 0
    names = grid.names
    for values in itertools.islice(grid, 5000):
        chosen = {
            **dict(zip(names, values, strict=True)),
            "launcher": "megatron_bridge",
            "model_recipe_name": "llama3_70b",
        }
        check(with_recipe_defaults(ResolvedCmdArgs.model_validate(chosen), recipe), system, recipe)
        plain += 1
    slow = plain / (time.process_time() - start)

    print(f"accepted {accepted} of {total}; broken rules: {dict(sorted(counts.items()))}")
    print(f"screen:   {fast:12,.0f} points/s, peak memory {peak:.0f} MiB")
    print(f"baseline: {slow:12,.0f} points/s (validate and check every point, {plain} points)")
    print(f"ratio:    {fast / slow:12.1f}")


def estimate(points: int) -> None:
    """Print the rates of `mbridge sweep plan` on three grids: the rules' one, and two of points that differ in all."""
    system = SlurmSystem(
        name="c", scheduler="slurm", default_partition="p", partitions=[{"name": "p"}], gpus_per_node=8
    )
    for name, (recipe, axes) in GRIDS.items():
        args = MegatronBridgeCmdArgs(
            launcher="megatron_bridge", model_recipe_name=recipe, gpu_type="gb200", max_steps=50, **axes
        )
        definition = TestDefinition(name="bench", description="", cmd_args=args)
        sweep = SweepSpace(definition, TestRun(id="bench", test_name="bench"))
        for is_estimated in (False, True):
            seen = _go_through(sweep, system, points, is_estimated)
            what = f"with estimates, {seen.held_back} of {seen.accepted} held back" if is_estimated else "rules alone"
            rate, peaks = seen.points / seen.seconds, f"{seen.half_mib:.0f}, {_peak_mib():.0f} MiB"
            print(f"plan, {name}: {rate:,.0f} points/s, {seen.seconds:.1f} s of CPU time for {seen.points}; ", end="")
            print(f"peak memory at half of them and all: {peaks} ({what})")


@dataclass
class Seen:
    """Counts of a look through a grid. half_mib: peak memory after half of the points."""

    points: int = 0
    accepted: int = 0
    held_back: int = 0
    seconds: float = 0.0
    half_mib: float = 0.0


def _go_through(sweep: SweepSpace, system: SlurmSystem, points: int, is_estimated: bool) -> Seen:
    estimates, seen, start = SweepEstimates(sweep, system, {}), Seen(), time.process_time()
    for point in itertools.islice(checked_points(sweep, system), points):
        seen.points += 1
        if seen.points == points // 2:
            seen.half_mib = _peak_mib()
        if not point.violations:
            seen.accepted += 1
            seen.held_back += is_estimated and estimates.of(point).exceeds(DEFAULT_LIMIT)
    seen.seconds = time.process_time() - start
    return seen


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    main(numbers[0] if numbers else 1_000_000)
    estimate(numbers[1] if len(numbers) > 1 else 100_000)
