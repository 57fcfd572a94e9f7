"""Losses that Megatron-Core keeps apart from the model's output: of the routers and of multi-token prediction."""

from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from cloudai_mbridge.training.compat.models import report_router_losses
from cloudai_mbridge.training.reporting.step_scalars import attempt


class _MoeMetricFanoutWriter:
    """Looks like a TensorBoard writer, and passes every scalar on to MLflow and Comet too."""

    def __init__(self, tb_writer: Any, comet_logger: Any, mlflow_logger: Any) -> None:
        self._tb_writer, self._comet, self._mlflow = tb_writer, comet_logger, mlflow_logger

    @staticmethod
    def _sanitize(value: Any) -> Any:
        """Return the number of a tensor with one element; anything else as it is."""
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        """Log one scalar. In MLflow's names a slash becomes an underscore."""
        if self._tb_writer is not None:
            self._tb_writer.add_scalar(name, value, iteration)
        if self._mlflow is not None:
            renamed = {name.replace("/", "_"): self._sanitize(value)}
            attempt("MLflow", lambda: self._mlflow.log_metrics(renamed, step=iteration))
        if self._comet is not None:
            number = {name: self._sanitize(value)}
            attempt("Comet", lambda: self._comet.log_metrics(number, step=iteration))


def _build_moe_metric_writer(tb_writer: Any, comet_logger: Any, mlflow_logger: Any) -> Any:
    """Return the TensorBoard writer itself, None included, unless MLflow or Comet log too."""
    if comet_logger is None and mlflow_logger is None:
        return tb_writer
    return _MoeMetricFanoutWriter(tb_writer, comet_logger, mlflow_logger)


def track_auxiliary_losses(
    model_config: Any,
    num_microbatches: int,
    iteration: int,
    writer: Any,
    wandb_writer: Any,
    total_loss_dict: dict[str, Any] | None,
    pg_collection: Any = None,
) -> None:
    """Log these losses' means over the micro-batches, add them to `total_loss_dict`, and reset them.

    A collective for models that have such losses: every rank must call it in every step.
    """
    if wandb_writer is not None and writer is None:
        writer = _MoeMetricFanoutWriter(None, None, None)  # Megatron-Core logs to W&B only together with a writer
    if getattr(model_config, "num_moe_experts", None) is not None:
        length = model_config.num_layers + (getattr(model_config, "mtp_num_layers", None) or 0)
        report_router_losses(
            _tracked_names(model_config),
            length,
            loss_scale=1.0 / num_microbatches,
            iteration=iteration,
            writer=writer,
            wandb_writer=wandb_writer,
            total_loss_dict=total_loss_dict,
            per_layer_logging=model_config.moe_per_layer_logging,
            num_layers=model_config.num_layers,
            moe_layer_freq=model_config.moe_layer_freq,
            mtp_num_layers=getattr(model_config, "mtp_num_layers", None),
            pg_collection=pg_collection,
        )
    if getattr(model_config, "mtp_num_layers", None):
        MTPLossLoggingHelper.track_mtp_metrics(1.0 / num_microbatches, iteration, writer, wandb_writer, total_loss_dict)


def _tracked_names(config: Any) -> list[str]:
    """Return the names of the losses that any rank's routers may have. "seq_aux_loss" also is an "aux_loss"."""
    kinds = config.moe_router_load_balancing_type
    names = {
        "load_balancing_loss": "aux_loss" in kinds,
        "seq_load_balancing_loss": "seq_aux_loss" in kinds,
        "global_load_balancing_loss": "global_aux_loss" in kinds,
        "z_loss": config.moe_z_loss_coeff is not None,
    }
    return [name for name, is_tracked in names.items() if is_tracked]
