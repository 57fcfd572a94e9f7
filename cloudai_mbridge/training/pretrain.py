"""Pre-train: the whole run of one rank, from process group to last line."""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.callbacks import Callback, CallbackManager, normalize_callbacks, should_fire
from cloudai_mbridge.training.checkpointing import check_checkpoint_packages
from cloudai_mbridge.training.comm_overlap.user_buffers import stop_user_buffers
from cloudai_mbridge.training.compat.checkpoints import abandon_saves
from cloudai_mbridge.training.compat.versions import installed_version
from cloudai_mbridge.training.config.container import ConfigContainer, required
from cloudai_mbridge.training.config.logger import set_up_logging
from cloudai_mbridge.training.config.text.serialization import resolved_yaml
from cloudai_mbridge.training.data import check_data_config
from cloudai_mbridge.training.data.finetuning import has_packed_sequences
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.eval import evaluate_and_print_results
from cloudai_mbridge.training.flops import FLOPS_FORMULA
from cloudai_mbridge.training.initialize import destroy, initialize
from cloudai_mbridge.training.loop.between_steps import EarlyExit, barrier_and_log, save_checkpoint_and_time
from cloudai_mbridge.training.loop.param_hooks import without_forward_pre_hooks
from cloudai_mbridge.training.mixed_precision import number_format
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine
from cloudai_mbridge.training.process.device import current_device, describe_device
from cloudai_mbridge.training.process.log_lines import RUN_MARK, render_record, run_token, write_line
from cloudai_mbridge.training.reporting.loggers import check_loggers
from cloudai_mbridge.training.reporting.reports import flops_per_step, memory_kind
from cloudai_mbridge.training.resilience.inprocess_restart import maybe_wrap_for_inprocess_restart
from cloudai_mbridge.training.resilience.packages import check_packages
from cloudai_mbridge.training.setup import SetupOutput, setup
from cloudai_mbridge.training.startup.environment import describe_environment, gather_host_facts
from cloudai_mbridge.training.startup.prepare import prepare
from cloudai_mbridge.training.startup.variables import set_variables
from cloudai_mbridge.training.state import GlobalState
from cloudai_mbridge.training.tokenizers.tokenizer import check_tokenizer
from cloudai_mbridge.training.train import _finish_train, train


def pretrain(
    config: ConfigContainer, forward_step_func: Any, callbacks: Sequence[Callback] | CallbackManager | None = None
) -> None:
    """Train `config.train.train_iters` steps and leave. Every rank calls it, under torchrun or alone.

    A process group that is up already is used, and left up. callbacks: see `training.callbacks`.

    ConfigError: before anything starts, if the configuration is invalid or requests an unsupported feature.
    RuntimeError: an in-process restart is configured and the process group is up already.
    SystemExit: the run leaves early; see `train`.
    """
    set_variables(config.env_vars)
    cpu.install()
    set_up_logging(config.logger)
    adapted = prepare(config)
    # A missing file or package would otherwise be found when all ranks are up
    check_data_config(config)
    check_tokenizer(config.tokenizer)
    check_loggers(config)
    check_packages(config)
    check_checkpoint_packages(config)
    state = GlobalState(config)
    state.callback_manager = normalize_callbacks(callbacks)
    if config.train.num_epochs is not None and should_fire(state.callback_manager, "on_data_init_start"):
        raise ConfigError("train.num_epochs reads the data before on_data_init_start; use train.train_iters")
    run, store = maybe_wrap_for_inprocess_restart(_pretrain, config, state)
    run(state, forward_step_func, adapted, store=store)


def _pretrain(state: GlobalState, forward_step_func: Any, adapted: dict[str, Any], store: Any = None) -> None:
    with cpu.megatron_device():
        owns_group = initialize(state.cfg, store)
        try:
            _run(setup(state), forward_step_func, adapted)
        except EarlyExit:
            _leave(state.cfg, owns_group)
            raise
        except BaseException:
            abandon_saves(state.async_calls_queue)
            raise
        _leave(state.cfg, owns_group)


def _leave(config: ConfigContainer, owns_group: bool) -> None:
    stop_user_buffers(config.model)
    if owns_group:
        destroy()


def _run(run: SetupOutput, forward_step_func: Any, adapted: dict[str, Any]) -> None:
    state, cfg = run.state, run.state.cfg
    _announce(state, run.model, adapted)
    if state.train_state.do_train and not cfg.validation.skip_train and required(cfg.train.train_iters) > 0:
        train(
            forward_step_func,
            run.model,
            run.optimizer,
            run.scheduler,
            run.train_data_iterator,
            run.valid_data_iterator,
            state,
            run.checkpointing_context,
        )
        barrier_and_log("after training is done")
        step, checkpoint = state.train_state.step, cfg.checkpoint
        if checkpoint.save and checkpoint.save_interval != 0 and step not in (0, state.last_saved_step):
            save_checkpoint_and_time(
                state,
                run.model,
                run.optimizer,
                run.scheduler,
                state.train_state.floating_point_operations_so_far,
                run.checkpointing_context,
                train_data_iterator=run.train_data_iterator,
            )
    for wanted, name, iterator in (
        (state.train_state.do_valid, "validation", run.valid_data_iterator),
        (state.train_state.do_test, "test", run.test_data_iterator),
    ):
        if wanted:
            prefix = f"iteration {state.train_state.step} on {name} set"
            batches = (forward_step_func, iterator, run.model, run.model[0].config)
            with without_forward_pre_hooks(run.model):  # on if nothing was trained
                evaluate_and_print_results(state, prefix, *batches, is_test=name == "test")
    _finish_train(state)


def _announce(state: GlobalState, model: list[Any], adapted: dict[str, Any]) -> None:
    """Log, once per run, software, hardware and settings, and write the resolved configuration."""
    hosts = gather_host_facts()
    if dist.get_rank() != 0:
        return
    if path := state.cfg.logger.save_config_filepath:
        resolved_yaml(state.cfg, path)
    facts = {
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": describe_device(),
        "dtype": number_format(state.cfg.model),
        "transformer_engine": has_transformer_engine(),
        "train_iters": state.cfg.train.train_iters,
        "first_iteration": state.train_state.step + 1,
        "tokens_per_step": required(state.cfg.train.global_batch_size) * state.cfg.model.seq_length,
        # a step of packed sequences has as many as its data give
        "flops_per_step": None if (is_packed := has_packed_sequences(state.cfg.dataset)) else flops_per_step(state),
        "flops_formula": FLOPS_FORMULA + (", by the lengths of packed sequences" if is_packed else ""),
        "parameters_on_rank_0": sum(p.numel() for chunk in model for p in chunk.parameters()),
        "adapted": adapted,
        "torch": str(torch.__version__),
        "megatron_core": installed_version(),
        "memory_kind": memory_kind(current_device()),
        "environment": {**describe_environment(), "hosts": hosts},
    }
    write_line(render_record(RUN_MARK, facts, run_token(os.environ)))
