"""Pre-train: the whole run of one rank, from process group to last line."""

from datetime import datetime
from typing import Any

import megatron.core
import torch
import torch.distributed as dist

from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.device import describe_device
from cloudai_mbridge.training.hang import HangWatch
from cloudai_mbridge.training.initialize import destroy, initialize
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine
from cloudai_mbridge.training.prepare import prepare
from cloudai_mbridge.training.setup import setup
from cloudai_mbridge.training.state import GlobalState
from cloudai_mbridge.training.train import train
from cloudai_mbridge.training.utils.flops import FLOPS_FORMULA
from cloudai_mbridge.training.utils.log_lines import RUN_MARK, render_record, write_line
from cloudai_mbridge.training.utils.required import required
from cloudai_mbridge.training.utils.train_utils import flops_per_step

_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def pretrain(config: ConfigContainer, forward_step_func: Any, watch: HangWatch | None = None) -> None:
    """Train `config.train.train_iters` steps and leave. Every rank calls it, under torchrun or alone.

    watch: keeps the stacks if no step is done for too long; nothing does without it.

    Raises:
        ConfigError: before anything starts, if the configuration is not valid or asks for what the loop does not do.
    """
    cpu.install()
    adapted = prepare(config)
    initialize(config)
    state = GlobalState(cfg=config)
    with cpu.megatron_device():
        run = setup(config)
    _announce(state, run.model, adapted)
    train(
        forward_step_func,
        run.model,
        run.optimizer,
        run.scheduler,
        run.train_data_iterator,
        state,
        watch or HangWatch(None),
    )
    if dist.get_rank() == 0:
        write_line(f"[after training is done] datetime: {datetime.now():%Y-%m-%d %H:%M:%S} ")
    destroy()


def _announce(state: GlobalState, model: list[Any], adapted: dict[str, Any]) -> None:
    """Say, once per run, what runs and on what, and write the configuration as it runs."""
    if dist.get_rank() != 0:
        return
    if path := state.cfg.logger.save_config_filepath:
        state.cfg.to_yaml(path)
    params_dtype = state.cfg.model.params_dtype
    facts = {
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": describe_device(),
        "dtype": _DTYPE_NAMES.get(params_dtype, ""),
        "transformer_engine": has_transformer_engine(),
        "train_iters": state.cfg.train.train_iters,
        "tokens_per_step": required(state.cfg.train.global_batch_size) * state.cfg.model.seq_length,
        "flops_per_step": flops_per_step(state),
        "flops_formula": FLOPS_FORMULA,
        "parameters_on_rank_0": sum(p.numel() for chunk in model for p in chunk.parameters()),
        "adapted": adapted,
        "torch": str(torch.__version__),
        "megatron_core": str(megatron.core.__version__),
    }
    write_line(render_record(RUN_MARK, facts))
