"""Logging: values, intervals and services, and Python's own logging, which has the libraries' messages."""

import logging
from dataclasses import dataclass
from functools import partial
from typing import Literal

from cloudai_mbridge.training.process.provenance import is_installed


@dataclass(kw_only=True)
class LoggerConfig:
    """Console, TensorBoard, Weights & Biases, MLflow and Comet. Intervals count iterations."""

    log_interval: int = 100
    log_params_norm: bool = False
    log_throughput: bool = False
    log_throughput_to_tensorboard: bool = False
    throughput_window_size: int = 100
    log_progress: bool = False
    timing_log_level: Literal[-1, 0, 1, 2] = 0  # -1: no timers at all
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    tensorboard_dir: str | None = None
    tensorboard_log_interval: int = 1
    tensorboard_queue_size: int = 1000
    log_timers_to_tensorboard: bool = False
    log_loss_scale_to_tensorboard: bool = True
    log_validation_ppl_to_tensorboard: bool = False
    log_memory_to_tensorboard: bool = False
    memory_keys: dict[str, str] | None = None
    log_memory_interval: int | None = None
    log_device_memory_used: bool = False
    log_l2_norm_grad_to_tensorboard: bool = False
    log_num_zeros_in_grad: bool = False
    log_max_attention_logit: bool = False
    log_runtime_to_tensorboard: bool = False
    runtime_time_unit: str = "hours"
    barrier_with_L1_time: bool = True  # noqa: N815
    log_world_size_to_tensorboard: bool = False
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_save_dir: str | None = None
    wandb_entity: str | None = None
    logging_level: int = logging.INFO
    filter_warnings: bool = True
    modules_to_filter: list[str] | None = None
    set_level_for_all_loggers: bool = False
    log_energy: bool = False
    save_config_filepath: str | None = None
    skip_train_metrics_log: bool = False
    mlflow_experiment: str | None = None
    mlflow_run_name: str | None = None
    mlflow_tracking_uri: str | None = None
    mlflow_tags: dict[str, str] | None = None
    mlflow_description: str | None = None
    mlflow_log_artifacts: bool = True
    comet_project: str | None = None
    comet_experiment_name: str | None = None
    comet_workspace: str | None = None
    comet_api_key: str | None = None
    comet_tags: list[str] | None = None
    moe_routing_trace_path: str | None = None
    moe_routing_trace_max_training_iters: int | None = None
    moe_routing_trace_capture_logits: bool = False
    moe_routing_trace_capture_hidden_states: bool = False
    moe_routing_trace_dump_weights: bool = False

    def finalize(self) -> None:
        """Check that each configured service is complete and installed.

        ValueError: an MLflow experiment without run name, or a Comet project without experiment name.
        ModuleNotFoundError: a field of a service is set and its package is not installed.
        """
        self._check_service("mlflow", "mlflow", "mlflow_experiment", "mlflow_run_name")
        self._check_service("comet", "comet_ml", "comet_project", "comet_experiment_name")

    def _check_service(self, prefix: str, package: str, group: str, run: str) -> None:
        if getattr(self, group) and not getattr(self, run):
            raise ValueError(f"{group}={getattr(self, group)!r} needs a name for this run: set {run}")
        used = [
            name
            for name in self.__dataclass_fields__
            if name.startswith(f"{prefix}_") and getattr(self, name) and name != "mlflow_log_artifacts"
        ]
        if used and not is_installed(package):
            raise ModuleNotFoundError(f"{', '.join(used)}: the package {package} is not installed", name=package)


def set_up_logging(config: LoggerConfig) -> None:
    """Set the level, and leave out warnings (`filter_warnings`) and the modules named in `modules_to_filter`.

    Records go to stderr. Handlers that exist are kept; `set_level_for_all_loggers` sets the level of loggers that have
    one of their own, too.
    """
    logging.basicConfig(format="%(name)s: %(message)s")
    root = logging.getLogger()
    root.setLevel(config.logging_level)
    for handler in root.handlers:
        for old in [each for each in handler.filters if isinstance(each, partial) and each.func is _is_shown]:
            handler.removeFilter(old)
        handler.addFilter(partial(_is_shown, config.filter_warnings, tuple(config.modules_to_filter or ())))
    if config.set_level_for_all_loggers:
        for name in list(logging.root.manager.loggerDict):
            logging.getLogger(name).setLevel(config.logging_level)


def _is_shown(drops_warnings: bool, modules: tuple[str, ...], record: logging.LogRecord) -> bool:
    if drops_warnings and record.levelno == logging.WARNING:
        return False
    return not any(record.name == name or record.name.startswith(f"{name}.") for name in modules)
