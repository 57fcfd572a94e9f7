"""Statistics of the tensors inside Transformer Engine's layers, by NVIDIA's nvdlfw_inspect: Megatron-Bridge's steps."""

from typing import Any

from megatron.core.parallel_state import get_tensor_and_data_parallel_group

from cloudai_mbridge.training.config.profiling import TensorInspectConfig, shipped_features
from cloudai_mbridge.training.errors import ConfigError


def start(config: TensorInspectConfig | None) -> None:
    """Start it, before the first layer is made. Every rank calls it.

    Raises ConfigError: features that cannot be read, or directories of others' code that are not allowed.
    """
    if config is None or not config.enabled:
        return
    own = config.feature_dirs and config.feature_dirs != shipped_features()
    if own and not config.allow_custom_feature_dirs:
        raise ConfigError(
            f"tensor_inspect.feature_dirs = {config.feature_dirs!r} holds code that would run; set"
            " tensor_inspect.allow_custom_feature_dirs = True if you trust it"
        )
    api = _api()
    api.end_debug()  # of an earlier run of this process that failed
    try:
        api.initialize(
            config_file=config.features or "",
            feature_dirs=config.feature_dirs,
            log_dir=config.log_dir,
            init_training_step=config.init_training_step,
            default_logging_enabled=True,
        )
    except Exception as error:  # whatever the package raises, the features are at fault
        text = " ".join(str(error).split())
        raise ConfigError(f"tensor_inspect.features = {config.features!r}: {text} ({type(error).__name__})") from error


def connect(config: TensorInspectConfig | None, model: list[Any], state: Any) -> None:
    """Name the layers, count from the finished step, and log to the run's loggers. After the checkpoint is loaded."""
    if config is None or not config.enabled:
        return
    api = _api()
    _add_loggers(state)
    api.initialize_training_step(state.train_state.step)
    api.infer_and_assign_layer_names(model)
    api.set_tensor_reduction_group(get_tensor_and_data_parallel_group())


def step(config: TensorInspectConfig | None) -> None:
    """Count a finished step, and write its statistics."""
    if config is not None and config.enabled:
        _api().step()


def stop(config: TensorInspectConfig | None) -> None:
    """End it. May be called again."""
    if config is not None and config.enabled:
        _api().end_debug()


def _api() -> Any:
    import nvdlfw_inspect.api as api

    return api


def _add_loggers(state: Any) -> None:
    from nvdlfw_inspect.logging import BaseLogger, MetricLogger, wrap_tensorboard_writer

    if state.tensorboard_logger is not None:
        MetricLogger.add_logger(wrap_tensorboard_writer(state.tensorboard_logger))
    wandb, comet = state.wandb_logger, state.comet_logger

    class Forward(BaseLogger):  # type: ignore[misc]
        def log_scalar(self, name: str, value: float, iteration: int, **kwargs: Any) -> None:
            if wandb is not None:
                wandb.log({name: value}, step=iteration)
            if comet is not None:
                comet.log_metrics({name: value}, step=iteration)

    if wandb is not None or comet is not None:
        MetricLogger.add_logger(Forward())
