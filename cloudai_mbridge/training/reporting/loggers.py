"""The logging services of the last rank: whether they will work, before training; open, log and close them.

A service that does not take a step's numbers is reported once and ends no run.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cloudai_mbridge.training.credentials.scrub import redacted_in
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.process.provenance import is_installed

# The setting that turns a service on, its package, and its name for pip
SERVICES = (
    ("tensorboard_dir", "tensorboard", "tensorboard"),
    ("wandb_project", "wandb", "wandb"),
    ("mlflow_experiment", "mlflow", "mlflow"),
    ("comet_project", "comet_ml", "comet-ml"),
)


def check_loggers(cfg: Any) -> None:
    """Check, on every rank, the requirements of the last rank's loggers.

    Raises ConfigError: a configured service's package is not installed, or W&B has no name for the run.
    """
    for setting, package, distribution in SERVICES:
        value = getattr(cfg.logger, setting)
        if value and not is_installed(package):
            raise ConfigError(
                f"logger.{setting}={value!r}: the package {package} is not installed; "
                f"pip install {distribution}, or leave logger.{setting} empty"
            )
    if cfg.logger.wandb_project and not cfg.logger.wandb_exp_name:
        raise ConfigError(
            f"logger.wandb_project={cfg.logger.wandb_project!r} needs a name for this run: set logger.wandb_exp_name"
        )


def open_tensorboard(cfg: Any) -> Any:
    """Return a SummaryWriter, or None if TensorBoard is not configured or this is not the last rank."""
    if not cfg.logger.tensorboard_dir or not _is_last_rank():
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=cfg.logger.tensorboard_dir, max_queue=cfg.logger.tensorboard_queue_size)


def open_wandb(cfg: Any) -> Any:
    """Return the wandb module with a run open, or None if W&B is not configured or this is not the last rank.

    WANDB_MODE=offline works without network and key. The key comes from WANDB_API_KEY or from `wandb login`.
    Raises ConfigError: no run could be opened; the message contains W&B's reason.
    """
    logger = cfg.logger
    if not logger.wandb_project or not _is_last_rank():
        return None
    import wandb
    from megatron.core import timers

    timers.wandb = wandb  # imported without it on a CPU (`cpu.import_megatron`)
    directory = Path(logger.wandb_save_dir or os.path.join(cfg.checkpoint.save or ".", "wandb"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        wandb.init(
            dir=str(directory),
            project=logger.wandb_project,
            name=logger.wandb_exp_name,
            entity=logger.wandb_entity,
            config=run_config(cfg),
        )
    except wandb.Error as error:
        raise ConfigError(
            f"logger.wandb_project={logger.wandb_project!r}: no W&B run could be opened ({error}); "
            "set WANDB_API_KEY, or WANDB_MODE=offline"
        ) from error
    return wandb


def open_mlflow(cfg: Any) -> Any:
    """Return the mlflow module with a run open, or None if MLflow is not configured or this is not the last rank.

    A run that is open already is used. The server and its credentials come from `logger.mlflow_tracking_uri` or from
    MLflow's environment variables.
    """
    logger = cfg.logger
    if not logger.mlflow_experiment or not _is_last_rank():
        return None
    import mlflow

    if logger.mlflow_tracking_uri:
        mlflow.set_tracking_uri(logger.mlflow_tracking_uri)
    if mlflow.active_run() is None:
        mlflow.set_experiment(logger.mlflow_experiment)
        mlflow.start_run(run_name=logger.mlflow_run_name, description=logger.mlflow_description)
    if logger.mlflow_tags:
        mlflow.set_tags(logger.mlflow_tags)
    # 500 characters are accepted by every MLflow server
    mlflow.log_params({name: str(value)[:500] for name, value in flat(run_config(cfg)).items()})
    return mlflow


def open_comet(cfg: Any) -> Any:
    """Return a Comet experiment, or None if Comet is not configured or this is not the last rank.

    COMET_START_ONLINE=0 keeps it in COMET_OFFLINE_DIRECTORY. The key comes from `logger.comet_api_key`,
    COMET_API_KEY or Comet's own settings.
    """
    logger = cfg.logger
    if not logger.comet_project or not _is_last_rank():
        return None
    import comet_ml

    experiment = comet_ml.start(
        api_key=logger.comet_api_key,
        workspace=logger.comet_workspace,
        project_name=logger.comet_project,
        experiment_config=comet_ml.ExperimentConfig(name=logger.comet_experiment_name, tags=logger.comet_tags),
    )
    experiment.log_parameters(flat(run_config(cfg)))
    return experiment


def _is_last_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def close_loggers(tensorboard: Any, wandb: Any, mlflow: Any, comet: Any) -> None:
    """Send the remaining data and close; each may be None or closed already."""
    if tensorboard is not None:
        tensorboard.close()
    if wandb is not None:
        wandb.finish()
    if mlflow is not None and mlflow.active_run() is not None:
        mlflow.end_run()
    if comet is not None:
        comet.end()


def run_config(cfg: Any) -> dict[str, Any]:
    """Return the configuration as plain data, without credentials."""
    shown: dict[str, Any] = redacted_in(cfg.to_dict())
    return shown


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return one level of dotted names, as services show parameters."""
    items: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        items.update(flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value})
    return items


def log_scalars(
    loggers: Sequence[Any], common: Mapping[str, Any], against_samples: Mapping[str, Any], step: int, samples: int
) -> None:
    """Log a step's numbers, by series, to the loggers of `GlobalState.open_loggers`. None: not known, and not logged.

    against_samples: TensorBoard shows these over `samples`, the sequences consumed so far, too.
    """
    tensorboard, wandb, mlflow, comet = loggers
    numbers = {name: _number(value) for name, value in {**common, **against_samples}.items() if value is not None}
    more = {"samples vs steps": samples} if against_samples else {}
    if tensorboard is not None:
        for name, value in numbers.items():
            tensorboard.add_scalar(name, value, step)
            if name in against_samples:
                tensorboard.add_scalar(f"{name} vs samples", value, samples)
    if wandb is not None:
        _attempt("W&B", lambda: wandb.log({**numbers, **more}, step))
    if mlflow is not None:
        names = {"throughput/tflops/device": "throughput/tflops_per_device"}  # "throughput/tflops" is a name already
        renamed = {names.get(name, name): value for name, value in {**numbers, **more}.items()}
        _attempt("MLflow", lambda: mlflow.log_metrics(renamed, step=step))
    if comet is not None:
        _attempt("Comet", lambda: comet.log_metrics(numbers, step=step))


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


_failed: set[str] = set()


def _attempt(service: str, log: Callable[[], Any]) -> None:
    """Call `log`; if the service fails, warn the first time, and continue."""
    try:
        log()
    except Exception as error:
        if service not in _failed:
            _failed.add(service)
            write_line(f"warning: {service} did not take the numbers of a step; training continues: {error!r}")


class _MoeMetricFanoutWriter:
    """Looks like a TensorBoard writer, and passes every scalar on to MLflow and Comet too."""

    def __init__(self, tb_writer: Any, comet_logger: Any, mlflow_logger: Any) -> None:
        self._tb_writer, self._comet, self._mlflow = tb_writer, comet_logger, mlflow_logger

    @staticmethod
    def _sanitize(value: Any) -> Any:
        """Return the number of a tensor with one element; anything else as it is."""
        return _number(value)

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        """Log one scalar. In MLflow's names a slash becomes an underscore."""
        if self._tb_writer is not None:
            self._tb_writer.add_scalar(name, value, iteration)
        if self._mlflow is not None:
            renamed = {name.replace("/", "_"): _number(value)}
            _attempt("MLflow", lambda: self._mlflow.log_metrics(renamed, step=iteration))
        if self._comet is not None:
            _attempt("Comet", lambda: self._comet.log_metrics({name: _number(value)}, step=iteration))


def _build_moe_metric_writer(tb_writer: Any, comet_logger: Any, mlflow_logger: Any) -> Any:
    """Return the TensorBoard writer itself, None included, unless MLflow or Comet log too."""
    if comet_logger is None and mlflow_logger is None:
        return tb_writer
    return _MoeMetricFanoutWriter(tb_writer, comet_logger, mlflow_logger)
