"""Functions and types that exist under Megatron-Bridge's names only, for users' scripts; nothing here uses them.

Functions that return OmegaConf's own objects (`create_omegaconf_dict_config`, `parse_hydra_overrides`) are missing.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from cloudai_mbridge.training.checkpointing.layout import LATEST_ITERATION, RUN_CONFIG, TRAIN_STATE
from cloudai_mbridge.training.config.logger import LoggerConfig, set_up_logging
from cloudai_mbridge.training.config.text import overrides
from cloudai_mbridge.training.config.text.yaml_text import read_yaml
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.state import TrainState

T = TypeVar("T")
logger = logging.getLogger("cloudai_mbridge.training.utils.train_utils")
TRAIN_STATE_FILE, CONFIG_FILE, TRACKER_PREFIX = TRAIN_STATE, RUN_CONFIG, "latest"
OverridesError = ConfigError
HAVE_NVRX = find_spec("nvidia_resiliency_ext") is not None

# A forward step takes (data iterator, model), or the state before them, or `return_schedule_plan` after them, or both
LossReduced = dict[str, torch.Tensor]
TwoTupleLossReturn = tuple[torch.Tensor, LossReduced]
ThreeTupleLossReturn = tuple[torch.Tensor, torch.Tensor, LossReduced]
InferenceLossReturn = Any
LossFunctionReturn = TwoTupleLossReturn | ThreeTupleLossReturn | InferenceLossReturn
LossFunction = partial[LossFunctionReturn]
ForwardStepResult = tuple[Any, Callable[..., Any]]
TwoArgForwardStep = Callable[[Any, Any], ForwardStepResult]
ThreeArgForwardStep = Callable[[Any, Any, bool], ForwardStepResult]
ThreeArgStateForwardStep = Callable[[Any, Any, Any], ForwardStepResult]
FourArgForwardStep = Callable[[Any, Any, Any, bool], ForwardStepResult]
ForwardStepFunctor = Callable[..., ForwardStepResult]
ForwardStepFunc = TwoArgForwardStep | ThreeArgForwardStep | ThreeArgStateForwardStep | FourArgForwardStep
ForwardStepCallable = ForwardStepFunc | ForwardStepFunctor


def file_exists(path: str) -> bool:
    """Return whether a file or a directory exists at `path`."""
    return Path(path).exists()


def ensure_directory_exists(filename: str, check_parent: bool = True) -> None:
    """Make a directory: that of a file, or with check_parent=False the one named."""
    (Path(filename).parent if check_parent else Path(filename)).mkdir(parents=True, exist_ok=True)


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    """Return the file that names the newest checkpoint's iteration."""
    return str(Path(checkpoints_path) / LATEST_ITERATION)


def read_run_config(run_config_filename: str) -> dict[str, Any]:
    """Read the configuration that a checkpoint was saved with, as plain data. Raises ConfigError: broken YAML."""
    data: dict[str, Any] = read_yaml(Path(run_config_filename))
    return data


def read_train_state(train_state_filename: str) -> TrainState:
    """Read the progress counters of a checkpoint. On this rank alone: it is not a collective."""
    state = TrainState()
    state.load_state_dict(torch.load(train_state_filename, weights_only=True))
    return state


def setup_logging(
    logging_level: int = logging.INFO,
    filter_warning: bool = True,
    modules_to_filter: Sequence[str] | None = None,
    set_level_for_all_loggers: bool = False,
) -> None:
    """Set Python's logging up as the fields of `logger` of these names do."""
    set_up_logging(
        LoggerConfig(
            logging_level=logging_level,
            filter_warnings=filter_warning,
            modules_to_filter=None if modules_to_filter is None else list(modules_to_filter),
            set_level_for_all_loggers=set_level_for_all_loggers,
        )
    )


def process_config_with_overrides(
    config: T, config_filepath: str | Path | None = None, cli_overrides: Sequence[str] | None = None
) -> T:
    """Apply a YAML file, then `key=value` texts, to `config` in place, and return it.

    FileNotFoundError: the file is missing.
    OverridesError: an override cannot be applied; `config` is unchanged then.
    """
    texts = list(cli_overrides or ())
    if config_filepath:
        data = read_yaml(Path(config_filepath)) or {}
        if not isinstance(data, dict):
            raise OverridesError(f"{config_filepath}: a table of sections is needed")
        texts = [*_texts(data), *texts]
    return overrides.apply_overrides(config, texts)


def apply_overrides(config_obj: Any, overrides_dict: Mapping[str, Any], excluded_fields: Any = None) -> None:
    """Apply nested tables to `config_obj` in place. excluded_fields: not used."""
    overrides.apply_overrides(config_obj, list(_texts(overrides_dict)))


def _texts(table: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Yield `a.b=value` for every leaf; a table that names its class is a leaf."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value and "_target_" not in value:
            yield from _texts(value, f"{prefix}{key}.")
        elif key != "_target_":
            yield f"{prefix}{key}={json.dumps(value)}"
