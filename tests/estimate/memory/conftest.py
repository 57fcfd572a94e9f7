"""Megatron-Core itself, as the embedded loop sets it up: any rank of any world, in this process.

torch's fake process group gives a rank its place; its collectives move no data, so shapes are real and values are not.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")


class Megatron:
    """Builds one rank's part of a model."""

    def __init__(self) -> None:
        from cloudai_mbridge.training import cpu

        cpu.install()

    def enter(
        self, sections: dict[str, Any], rank: int, world_size: int, changes: Mapping[str, Any] | None = None
    ) -> Any:
        """Become rank `rank` of the layout that `sections` ask for; return the validated configuration.

        changes: fields of the model that the configuration's schema does not take.
        """
        import torch.distributed as dist
        from megatron.core.tensor_parallel import random as mrandom
        from torch.testing._internal.distributed.fake_pg import FakeStore

        from cloudai_mbridge.training.initialize import initialize_megatron

        self.leave()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        config = self.configure(sections, changes)
        mrandom._CUDA_RNG_STATE_TRACKER.reset()
        initialize_megatron(config)
        return config

    def configure(self, sections: dict[str, Any], changes: Mapping[str, Any] | None = None) -> Any:
        """Return the validated configuration of another model in the layout that this rank has entered."""
        from cloudai_mbridge.training.config import ConfigContainer, runtime_config_update
        from cloudai_mbridge.training.startup.prepare import adapt_to_device

        config = ConfigContainer.from_dict(sections)
        adapt_to_device(config)
        for name, value in (changes or {}).items():
            setattr(config.model, name, value)
        runtime_config_update(config)
        return config

    def chunks(self, config: Any, device: str) -> list[Any]:
        """Build the model chunks of this rank, one per virtual stage."""
        from cloudai_mbridge.training.cpu import megatron_device

        stages = config.model.virtual_pipeline_model_parallel_size
        with megatron_device(), torch.device(device):
            return [config.model.provide(vp_stage=stage) for stage in (range(stages) if stages else (None,))]

    def leave(self) -> None:
        """Leave no process group behind, and no scale of the losses, which Megatron-Core keeps with its shape."""
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            destroy_num_microbatches_calculator()
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def megatron(request: pytest.FixtureRequest) -> Iterator[Megatron]:
    """Return the builder; the generators and the environment are put back afterwards."""
    patch = pytest.MonkeyPatch()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        patch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    oracle = Megatron()
    try:
        yield oracle
    finally:
        oracle.leave()
        torch.set_num_threads(threads)
        patch.undo()
