"""`python -m cloudai_mbridge.training --config FILE [OVERRIDE ...]`, alone or under torchrun."""

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

from cloudai_mbridge.training.compat.versions import why_unusable
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.hang import hang_timeout_s, hang_watch, seconds_before
from cloudai_mbridge.training.startup.variables import bind, dump_variables, set_variables_of_file


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cloudai_mbridge.training", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON file with a ConfigContainer")
    parser.add_argument("overrides", nargs="*", help="such as train.train_iters=20 ~profiling")
    args = parser.parse_args()
    try:
        bind()
        set_variables_of_file(args.config, args.overrides)
        dump_variables()
        timeout_s = hang_timeout_s(os.environ)
    except ConfigError as error:
        return _refuse(error)
    if reason := why_unusable():
        return _refuse(ConfigError(reason))
    with hang_watch(timeout_s, seconds_before(os.environ, time.time())):
        warnings.filterwarnings("ignore", message=".*not installed. Falling back.*")  # MBRIDGE_RUN reports it once
        # Imported only now: a hang while torch and Megatron-Core load leaves its stacks too.
        from cloudai_mbridge.training.cpu import import_megatron

        import_megatron()
        from cloudai_mbridge.training.config import ConfigContainer
        from cloudai_mbridge.training.config.text.overrides import apply_overrides
        from cloudai_mbridge.training.finetune import finetune
        from cloudai_mbridge.training.gpt_step import forward_step
        from cloudai_mbridge.training.pretrain import pretrain

        try:
            config = apply_overrides(ConfigContainer.from_yaml(args.config), args.overrides)
            (finetune if config.checkpoint.pretrained_checkpoint else pretrain)(config, forward_step)
        except ConfigError as error:
            return _refuse(error)
    return 0


def _refuse(error: ConfigError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


# Megatron's distributed checkpointing spawns processes that import this module again.
if __name__ == "__main__":
    sys.exit(main())
