"""NCCL's flight recorder: a rank's collectives, written to a file when one of them times out."""

import logging
import os
from collections.abc import MutableMapping

from cloudai_mbridge.training.config.dist import DistributedInitConfig

logger = logging.getLogger(__name__)

_PATHS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # the second is torch's older name


def set_flight_recorder(config: DistributedInitConfig, env: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that torch reads when the process group starts; nothing without a path, here or there.

    Variables of the environment win, with a warning if they differ.
    """
    given = [env[name] for name in _PATHS if env.get(name)]
    path = given[0] if given else config.flight_recorder_dump_path
    if not path:
        return
    wanted = dict.fromkeys(_PATHS, path) | {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(config.flight_recorder_trace_buffer_size),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(config.flight_recorder_dump_on_timeout)),
        "TORCH_INCLUDE_STACK_TRACE": str(int(config.flight_recorder_include_stack_trace)),
        "TORCH_INCLUDE_ONLY_ACTIVE": str(int(config.flight_recorder_include_only_active)),
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": str(int(config.flight_recorder_extra_dump_on_exec)),
    }
    for name, value in wanted.items():
        if (there := env.setdefault(name, value)) != value:
            logger.warning("%s=%s in the environment: %s of the configuration is not used", name, there, value)
