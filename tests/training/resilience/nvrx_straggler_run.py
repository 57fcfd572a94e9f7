"""The real straggler detector on two gloo ranks. Fake is the reader of GPU counters alone: rank 1's kernel is slow."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.config.resilience import NVRxStragglerDetectionConfig
from cloudai_mbridge.training.resilience.straggler import (
    NVRxStragglerDetectionManager,
    check_nvrx_straggler_detection,
    safe_shutdown_nvrx_straggler_manager,
)


class FakeProfiler:
    """Stands for CUPTI, which needs a GPU."""

    def __init__(self, **kwargs: Any) -> None:
        self.measured_runs = 0

    def start(self) -> None:
        """Count a measured step."""
        self.measured_runs += 1

    def get_stats(self) -> dict[str, Any]:
        """Return the times of one kernel."""
        ms = 3.0 if dist.get_rank() == 1 else 1.0
        stats = SimpleNamespace(min=ms, max=ms, median=ms, avg=ms, stddev=0.0, num_calls=self.measured_runs)
        return {"gemm": stats}

    def initialize(self) -> None:
        """Do nothing."""

    stop = shutdown = reset = initialize


def main() -> None:
    """Train until both ranks are told of the straggler."""
    cpu.install()
    sys.modules["nvrx_cupti_module"] = SimpleNamespace(CuptiProfiler=FakeProfiler)  # type: ignore[assignment]
    dist.init_process_group("gloo")
    config = NVRxStragglerDetectionConfig(enabled=True, report_time_interval=0.05, stop_if_detected=True)
    manager = NVRxStragglerDetectionManager(config)
    manager.initialize()
    calls: list[int] = []
    step = manager.wrap_train_step_function(lambda number: calls.append(number) or time.sleep(0.01))
    for number in range(1, 200):
        step(number)
        if check_nvrx_straggler_detection(manager):
            break
    else:
        raise AssertionError("nothing was detected in 200 steps")
    assert calls == list(range(1, number + 1))
    measured = manager._straggler.Detector.cupti_manager.cupti_ext.measured_runs
    assert measured == number, (measured, number)
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    assert len(set(numbers)) == 1, numbers
    safe_shutdown_nvrx_straggler_manager(manager)
    safe_shutdown_nvrx_straggler_manager(manager)
    step(0)
    assert not check_nvrx_straggler_detection(manager)
    dist.barrier()
    dist.destroy_process_group()
    print("stopped")


if __name__ == "__main__":
    main()
