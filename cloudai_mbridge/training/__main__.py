"""`python -m cloudai_mbridge.training --config FILE`, alone or under torchrun."""

import argparse
import sys
import warnings
from pathlib import Path

from cloudai_mbridge.training.config import ConfigError, load_config


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cloudai_mbridge.training", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file with the sections of ConfigContainer")
    args = parser.parse_args()
    try:
        config = load_config(args.config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", message=".*not installed. Falling back.*")  # MBRIDGE_RUN says it once
    # Imported only now: a bad config is refused in milliseconds, before torch and Megatron-Core load.
    from cloudai_mbridge.training.gpt_step import forward_step
    from cloudai_mbridge.training.pretrain import pretrain

    pretrain(config, forward_step)
    return 0


# Megatron's distributed checkpointing spawns processes that import this module again.
if __name__ == "__main__":
    sys.exit(main())
