"""What the training loop costs beyond its steps: our step over a bare Megatron-Core step, of one model in one process.

    python tests/benchmarks/loop_overhead.py
    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/benchmarks/loop_overhead.py

`cloudai_mbridge/gpu_check/overhead.py` says what is compared, and is part of `make gpu-check` too.
"""

import argparse
import sys
import warnings

import torch.distributed as dist

from cloudai_mbridge.gpu_check.overhead import CPU_MODEL, Bench, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    warnings.filterwarnings("ignore")
    bench = Bench(CPU_MODEL)
    figures = summary(bench.measure(rounds), bench.inside)
    if dist.get_rank() == 0:
        pairs, inside = figures["ratio_per_pair"], figures["period_over_megatron"]
        for line in (
            f"{dist.get_world_size()} rank(s), {figures['num_steps']} steps of each kind, every step logged",
            f"bare Megatron-Core step  {figures['bare_step_s'] * 1e3:8.2f} ms (median)",
            f"our loop, per step       {figures['loop_step_s'] * 1e3:8.2f} ms (median)",
            f"ratio of the medians     {figures['ratio']:8.4f}",
            f"ratio per pair of blocks {pairs['median']:8.4f}"
            f" (10 % to 90 %: {pairs['low']:.3f} to {pairs['high']:.3f})",
            f"period over Megatron's part of the same step {inside['median']:.4f}"
            f" (10 % to 90 %: {inside['low']:.4f} to {inside['high']:.4f})",
        ):
            print(line, file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
