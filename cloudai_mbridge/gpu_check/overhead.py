"""Overhead of the training loop: our step over a bare Megatron-Core step, of one model in one process.

The bare step is the baseline: gradient buffers zeroed, Megatron's schedule, optimizer, scheduler, and nothing else.
Ours is the whole period of the loop from one step to the next, with every step logged. Blocks of both alternate, so
that both meet the same noise. Both draw their data from the same iterator.

A busy machine may drown the difference. The second figure does not depend on it: inside the loop, the whole period over
the part of the same step that is Megatron-Core's. To time that part, the device has to finish it first, so these steps
are in blocks of their own.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from cloudai_mbridge.recipes.container import container_data

CPU_MODEL = {
    "num_layers": 4,
    "hidden_size": 512,
    "ffn_hidden_size": 1536,
    "num_attention_heads": 8,
    "vocab_size": 8192,
    "seq_length": 128,
    "dtype": "fp32",
}
# Steps long enough to be limited by the GPU, not by the CPU
GPU_MODEL = {
    "num_layers": 8,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 16,
    "vocab_size": 32768,
    "seq_length": 2048,
    "dtype": "bf16",
}
STEPS = 21  # of a block; the first is not counted
NOT_COUNTED = 1
Blocks = list[tuple[list[float], list[float]]]  # bare, loop: seconds per step


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a block")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    bench = Bench(GPU_MODEL if torch.cuda.is_available() else CPU_MODEL, args.steps)
    figures = summary(bench.measure(args.rounds), bench.inside)
    torch.distributed.destroy_process_group()
    print(json.dumps(figures))


def summary(pairs: Blocks, inside: list[float]) -> dict[str, Any]:
    """Return medians and ratios; low and high: the tenth and the ninetieth percentile."""
    bare = statistics.median(s for block, _ in pairs for s in block)
    loop = statistics.median(s for _, block in pairs for s in block)
    ratios = [statistics.median(ours) / statistics.median(theirs) for theirs, ours in pairs]
    return {
        "num_steps": sum(len(block) for block, _ in pairs),
        "bare_step_s": bare,
        "loop_step_s": loop,
        "ratio": loop / bare,
        "ratio_per_pair": _spread(ratios),
        "period_over_megatron": _spread(inside),
    }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return {"median": statistics.median(ordered), "low": ordered[tenth], "high": ordered[-1 - tenth]}


class Bench:
    """One model, trained by turns by the bare step and by the loop."""

    def __init__(self, model: Mapping[str, Any], steps: int = STEPS) -> None:
        from cloudai_mbridge.training import cpu, step, train
        from cloudai_mbridge.training.config import ConfigContainer
        from cloudai_mbridge.training.gpt_step import forward_step
        from cloudai_mbridge.training.initialize import initialize
        from cloudai_mbridge.training.process.device import synchronize
        from cloudai_mbridge.training.setup import setup
        from cloudai_mbridge.training.startup.prepare import prepare
        from cloudai_mbridge.training.state import GlobalState

        cpu.install()
        train_section = {"train_iters": 10**6, "micro_batch_size": 1, "global_batch_size": 2}
        sections = {"model": model, "train": train_section, "optimizer": {"lr": 1e-4}}
        config = ConfigContainer.from_dict(container_data(sections))
        config.logger.save_config_filepath = None
        prepare(config)
        self._steps = steps
        self._device, self._train, self._forward_step = cpu.megatron_device, train, forward_step
        self._synchronize = synchronize
        with self._device():
            initialize(config)
            self._run = setup(GlobalState(config))
        self._starts: list[float] = []
        self._megatron_s: list[float] | None = None  # per step of a block in which Megatron-Core is timed
        self.inside: list[float] = []
        # What every step of a timed block spends in the schedule with its zeroing, optimizer and scheduler
        step._forward_backward = self._timed(step._forward_backward)
        self._run.optimizer.step = self._timed(self._run.optimizer.step)
        self._run.scheduler.step = self._timed(self._run.scheduler.step)
        self._step = train.train_step
        train.train_step = self._noted_step  # type: ignore[assignment]

    def measure(self, rounds: int) -> Blocks:
        """Return the steps of as many pairs of blocks, after one that warms up; each round has a timed block too."""
        self.bare_block(), self.loop_block()
        pairs = []
        for _ in range(rounds):
            pairs.append((self.bare_block(), self.loop_block()))
            self.timed_block()
        return pairs

    def _timed(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            if self._megatron_s:
                self._synchronize()
                self._megatron_s[-1] += time.perf_counter() - start
            return result

        return call

    def _noted_step(self, *args: Any) -> Any:
        self._starts.append(time.perf_counter())
        if self._megatron_s is not None:
            self._megatron_s.append(0.0)
        return self._step(*args)

    def _periods(self) -> list[float]:
        starts, self._starts = self._starts, []
        return [b - a for a, b in pairwise(starts)][NOT_COUNTED:]

    def loop_block(self) -> list[float]:
        """Train a block of steps with the loop; return the period of each (s)."""
        run = self._run
        run.state.cfg.train.train_iters = run.state.train_state.step + self._steps + 1
        with self._device():
            self._train.train(
                self._forward_step,
                run.model,
                run.optimizer,
                run.scheduler,
                run.train_data_iterator,
                None,
                run.state,
                run.checkpointing_context,
            )
        return self._periods()

    def timed_block(self) -> None:
        """Train a block of steps with the loop; add to `inside` the period of each over Megatron-Core's part of it."""
        times: list[float] = []
        self._megatron_s = times
        periods = self.loop_block()
        self._megatron_s = None
        self.inside += [period / part for period, part in zip(periods, times[NOT_COUNTED:-1], strict=True)]

    def bare_block(self) -> list[float]:
        """Train a block of steps with nothing but Megatron-Core; return the period of each (s)."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.pipeline_parallel import get_forward_backward_func

        run, cfg = self._run, self._run.state.cfg
        with self._device():
            for _ in range(self._steps + 1):
                self._synchronize()
                self._starts.append(time.perf_counter())
                for chunk in run.model:
                    chunk.zero_grad_buffer()
                run.optimizer.zero_grad()
                get_forward_backward_func()(
                    forward_step_func=partial(self._forward_step, run.state),
                    data_iterator=run.train_data_iterator,
                    model=run.model,
                    num_microbatches=get_num_microbatches(),
                    seq_length=cfg.model.seq_length,
                    micro_batch_size=cfg.train.micro_batch_size,
                    forward_only=False,
                )
                run.optimizer.step()
                run.scheduler.step(increment=cfg.train.global_batch_size)
        return self._periods()


if __name__ == "__main__":
    main()
