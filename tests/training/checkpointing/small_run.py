"""A small run for scripts under test: the training program's own parts, without its loop."""

import json
import random
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cloudai_mbridge.training import cpu

cpu.install()

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator, get_num_microbatches  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from cloudai_mbridge.recipes.container import container_data  # noqa: E402
from cloudai_mbridge.training.checkpointing import (  # noqa: E402
    CheckpointError,
    init_checkpointing_context,
    load_checkpoint,
    load_pretrained,
    maybe_finalize_async_save,
    save_checkpoint,
)
from cloudai_mbridge.training.config import ConfigContainer  # noqa: E402
from cloudai_mbridge.training.config.rules.validate import runtime_config_update  # noqa: E402
from cloudai_mbridge.training.initialize import initialize, initialize_megatron  # noqa: E402
from cloudai_mbridge.training.optim import build_optimizer, build_scheduler  # noqa: E402
from cloudai_mbridge.training.setup import build_model  # noqa: E402
from cloudai_mbridge.training.startup.prepare import adapt_to_device  # noqa: E402

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 256,
        "seq_length": 16,
        "dtype": "fp32",
    },
    "train": {"train_iters": 10, "micro_batch_size": 1, "global_batch_size": 4},
    "optimizer": {"lr": 1e-2, "min_lr": 1e-3},
    "scheduler": {"lr_warmup_iters": 2},
}


@dataclass
class Progress:
    """Stands for the program's TrainState."""

    step: int = 0
    consumed_train_samples: int = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(value) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name in vars(self):
            setattr(self, name, state[name].item())


@dataclass
class Run:
    """A run: `train` steps, `save`, `load`."""

    state: Any
    model: list[Any]
    optimizer: Any
    scheduler: Any
    context: dict[str, Any] = field(default_factory=dict)

    def train(self, steps: int) -> list[float]:
        """Return the losses of the next steps, the same on every rank."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        cfg, progress = self.state.cfg, self.state.train_state
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=[_data(cfg, progress.step) for _ in self.model],
            model=self.model,
            num_microbatches=get_num_microbatches(),
            seq_length=cfg.model.seq_length,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        self.scheduler.step(increment=cfg.train.global_batch_size)
        progress.step += 1
        progress.consumed_train_samples += cfg.train.global_batch_size
        loss = torch.zeros(2)
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            loss = torch.stack([each["loss"] for each in losses]).sum(0)
            dist.all_reduce(loss, group=mpu.get_data_parallel_group(with_context_parallel=True))
        dist.broadcast(loss, dist.get_world_size() - 1)
        maybe_finalize_async_save(self.state, cfg.checkpoint)
        return (loss[0] / loss[1]).item()

    def save(self, non_persistent: bool = False) -> None:
        save_checkpoint(
            self.state,
            self.model,
            self.optimizer,
            self.scheduler,
            self.state.train_state.step * 1e9,
            self.context,
            non_persistent_ckpt=non_persistent,
        )

    def load(self) -> tuple[int, float]:
        return load_checkpoint(
            self.state, self.model, self.optimizer, self.scheduler, checkpointing_context=self.context
        )

    def finish(self) -> None:
        maybe_finalize_async_save(self.state, self.state.cfg.checkpoint, blocking=True, terminate=True)

    def bits(self) -> list[torch.Tensor]:
        """Return this rank's parameters and optimizer state."""
        found = [p.detach().clone() for chunk in self.model for p in chunk.parameters()]
        for part in self.optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                found += [torch.as_tensor(state[key]).clone() for key in sorted(state)]
        return found


_up: list[Any] = []  # of each run: what its groups depend on


def _groups_of(config: Any) -> Any:
    """Return what Megatron's groups depend on; None with pipeline stages, whose embeddings' ranks depend on the model.

    To make the groups of a run takes as long as to build its model and to train a step.
    """
    model = config.model
    if model.pipeline_model_parallel_size > 1:
        return None
    sizes = [
        getattr(model, f"{name}_parallel_size") for name in ("tensor_model", "context", "expert_model", "expert_tensor")
    ]
    more = (model.hierarchical_context_parallel_sizes, config.ddp.num_distributed_optimizer_instances)
    return (*sizes, *more, repr(config.dist))


def start(**sections: dict[str, Any]) -> Run:
    """Build a run with these settings on top of `SECTIONS`, in place of the one before."""
    names = {*SECTIONS, *sections}
    config = ConfigContainer.from_dict(
        container_data({name: {**SECTIONS.get(name, {}), **sections.get(name, {})} for name in names})
    )
    config.dist.distributed_backend = "gloo"
    if not dist.is_initialized():
        _prepare(config)
        initialize(config)
    else:
        if (groups := _groups_of(config)) is None or groups != _up[-1]:
            mpu.destroy_model_parallel()
        destroy_num_microbatches_calculator()
        _prepare(config)
        initialize_megatron(config)
    _up.append(_groups_of(config))
    random.seed(config.rng.seed)
    np.random.seed(config.rng.seed)
    state = SimpleNamespace(
        cfg=config, train_state=Progress(), async_calls_queue=None, callback_manager=None, completed_saves=[]
    )
    model = build_model(config, partial(load_pretrained, state))
    optimizer = build_optimizer(config, model)
    model[0].config.grad_scale_func = optimizer.scale_loss
    model[0].config.finalize_model_grads_func = finalize_model_grads
    if config.ddp.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in model]
        model[0].config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    context = init_checkpointing_context(config.checkpoint)
    return Run(state, model, optimizer, build_scheduler(config, optimizer), context)


def launch(scenario: Any) -> None:
    """Run `scenario()`, which returns this rank's results, and print those of all ranks on rank 0."""
    with cpu.megatron_device():
        results = scenario()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, results)
        if dist.get_rank() == 0:
            print("RESULTS " + json.dumps(everyone), flush=True)
        dist.barrier()
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def resumes_bit_equal(name: str, before: int = 2, after: int = 2, **sections: dict[str, Any]) -> dict[str, Any]:
    """Train, save, train on; load into a new run, train on; return whether every bit is the same."""
    checkpoint = {"save": name, "load": name, **sections.pop("checkpoint", {})}
    whole = start(**sections, checkpoint=checkpoint)
    whole.train(before)
    whole.save()
    losses = whole.train(after)
    whole.finish()
    draws = [random.random(), float(np.random.rand()), torch.rand(1).item()]
    resumed = start(**sections, checkpoint=checkpoint)
    position = resumed.load()
    same_losses = resumed.train(after) == losses
    same_bits = all(map(torch.equal, whole.bits(), resumed.bits()))
    same_draws = draws == [random.random(), float(np.random.rand()), torch.rand(1).item()]
    groups = [g for part in resumed.optimizer.chained_optimizers for g in part.optimizer.param_groups]
    return {
        "position": position,
        "same": [same_losses, same_bits, same_draws],
        "is_fused": all(group.get("fused") for group in groups),
        "samples": resumed.state.train_state.consumed_train_samples,
    }


def difference_after(name: str, one: dict[str, Any], other: dict[str, Any], **checkpoint: Any) -> float:
    """Save in one layout, train on in that and in another one; return the largest difference of the losses."""
    places = {"save": name, "load": name, "dist_ckpt_optim_fully_reshardable": True, **checkpoint}
    first = start(**one, checkpoint=places)
    first.train(2)
    first.save()
    losses = first.train(2)
    second = start(**other, checkpoint=places)
    second.load()
    return max(abs(a - b) for a, b in zip(losses, second.train(2), strict=True))


def refusal(run: Run) -> str:
    """Return the message that loading is refused with; empty if it is not."""
    try:
        run.load()
    except CheckpointError as error:
        return str(error)
    return ""


def _prepare(config: Any) -> None:
    adapt_to_device(config)
    runtime_config_update(config)


def _data(cfg: Any, step: int) -> Any:
    """Yield this rank's micro-batches of a step; each global batch is the same under every layout."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(
        cfg.model.vocab_size, (cfg.train.global_batch_size, cfg.model.seq_length + 1), generator=generator
    )
    for i in range(mpu.get_data_parallel_rank(), len(tokens), mpu.get_data_parallel_world_size()):
        yield tokens[i : i + 1]


def _forward(iterator: Any, model: Any) -> Any:
    tokens = next(iterator)
    length = tokens.size(1) - 1
    output = model(tokens[:, :-1], torch.arange(length).unsqueeze(0), None, labels=tokens[:, 1:])
    np.random.rand()
    random.random()

    def loss(losses: torch.Tensor) -> Any:
        total = losses.float().sum()
        return total / length, {"loss": torch.stack([total.detach(), torch.tensor(float(length))])}

    return output, loss
