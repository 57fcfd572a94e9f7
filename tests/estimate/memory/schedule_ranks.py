"""One rank of a real step with gloo: prints the peak of its saved-tensor bytes for every configuration of a file."""

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from saved_tensors import SavedTensors

from cloudai_mbridge.training import cpu


def batches(config: Any) -> Iterator[dict[str, Any]]:
    shape = (config.train.micro_batch_size, config.model.seq_length)
    while True:
        tokens = torch.randint(0, 1000, shape)
        positions = torch.arange(shape[1]).repeat(shape[0], 1)
        yield {"tokens": tokens, "labels": tokens, "position_ids": positions, "loss_mask": torch.ones(shape)}


def step(data: dict[str, Any], store: Any) -> dict[str, Any]:
    """Run one step of all micro-batches; return this stage's peak, and the rows its experts met over the mean."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.experts import SequentialMLP

    from cloudai_mbridge.training.config import ConfigContainer, runtime_config_update
    from cloudai_mbridge.training.cpu import megatron_device
    from cloudai_mbridge.training.gpt_step import forward_step
    from cloudai_mbridge.training.initialize import destroy, initialize
    from cloudai_mbridge.training.setup import build_model
    from cloudai_mbridge.training.startup.prepare import adapt_to_device
    from cloudai_mbridge.training.state import GlobalState

    config = ConfigContainer.from_dict(data)
    adapt_to_device(config)
    runtime_config_update(config)
    initialize(config, store)
    rows: list[int] = []
    with megatron_device():
        chunks = build_model(config)
        for module in (module for chunk in chunks for module in chunk.modules() if isinstance(module, SequentialMLP)):
            module.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
        saved = SavedTensors(parameter for chunk in chunks for parameter in chunk.parameters())
        iterators = [batches(config) for _ in chunks]
        with saved.hooks():
            get_forward_backward_func()(
                forward_step_func=partial(forward_step, GlobalState(config)),
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=chunks if len(chunks) > 1 else chunks[0],
                num_microbatches=get_num_microbatches(),
                seq_length=config.model.seq_length,
                micro_batch_size=config.train.micro_batch_size,
                forward_only=False,
            )
    model = config.model
    tokens = config.train.micro_batch_size * model.seq_length // model.tensor_model_parallel_size
    mean = tokens * (model.moe_router_topk or 0) * (model.expert_tensor_parallel_size or 1)
    result = {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "peak": saved.peak,
        "imbalance": sum(rows) / len(rows) / mean if rows else 1.0,
    }
    destroy()
    return result


def main() -> None:
    from torch.distributed import PrefixStore

    cpu.install()
    configurations, results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), []
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch.distributed.FileStore(sys.argv[2] + "/store", size)
    for index, data in enumerate(configurations):
        results.append(step(data, PrefixStore(str(index), store)))
    Path(sys.argv[2], f"rank{rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
