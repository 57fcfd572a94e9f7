"""`python -m cloudai_mbridge.training.merge_adapters --config FILE --into DIRECTORY [OVERRIDE ...]`

Merges the adapters of a checkpoint into the weights that they adapt: a plain checkpoint, in any layout, alone or under
torchrun. FILE is the configuration of the run, whose `checkpoint.load` has the adapters.
"""

import argparse
import copy
import sys
from pathlib import Path

from cloudai_mbridge.training import cpu

cpu.import_megatron()

from functools import partial  # noqa: E402
from typing import Any  # noqa: E402

from megatron.core.utils import unwrap_model  # noqa: E402

from cloudai_mbridge.training.checkpointing import load_checkpoint, load_pretrained, save_checkpoint  # noqa: E402
from cloudai_mbridge.training.config import ConfigContainer  # noqa: E402
from cloudai_mbridge.training.config.text.overrides import apply_overrides  # noqa: E402
from cloudai_mbridge.training.errors import ConfigError  # noqa: E402
from cloudai_mbridge.training.initialize import destroy, initialize  # noqa: E402
from cloudai_mbridge.training.peft.apply import merge  # noqa: E402
from cloudai_mbridge.training.setup import build_model  # noqa: E402
from cloudai_mbridge.training.startup.prepare import prepare  # noqa: E402
from cloudai_mbridge.training.state import GlobalState  # noqa: E402


def merge_adapters(config: ConfigContainer, directory: str) -> None:
    """Load weights and adapters as `config` names them, and save the merged weights into a directory. A collective.

    Raises ConfigError: the configuration is not valid, or has no adapters to load. CheckpointError: nothing is there.
    """
    cpu.install()
    config.checkpoint.load_optim = config.checkpoint.load_rng = False
    config.checkpoint.exit_on_missing_checkpoint = True
    prepare(config)
    if config.peft is None or config.checkpoint.load is None:
        raise ConfigError("merging needs peft, and checkpoint.load with its adapters")
    state = GlobalState(config)
    with cpu.megatron_device():
        owns_group = initialize(config)
        model = build_model(config, partial(load_pretrained, state))
        load_checkpoint(state, model, None, None)
        save_merged(state, model, directory)
        if owns_group:
            destroy()


def save_merged(state: Any, model: list[Any], directory: str) -> None:
    """Merge the adapters of a model, which has none then, and save its weights alone. A collective."""
    for chunk in unwrap_model(model):
        merge(chunk)
    plain = copy.copy(state)
    plain.cfg = copy.copy(state.cfg)
    plain.cfg.peft, plain.cfg.checkpoint = None, copy.copy(state.cfg.checkpoint)
    checkpoint = plain.cfg.checkpoint
    checkpoint.save, checkpoint.async_save = directory, False
    checkpoint.save_optim = checkpoint.save_rng = False
    save_checkpoint(plain, model, None, None, 0, {})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cloudai_mbridge.training.merge_adapters", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON file with a ConfigContainer")
    parser.add_argument("--into", required=True, help="directory of the merged checkpoint")
    parser.add_argument("overrides", nargs="*", help="such as checkpoint.load=adapters")
    args = parser.parse_args()
    try:
        merge_adapters(apply_overrides(ConfigContainer.from_yaml(args.config), args.overrides), args.into)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
