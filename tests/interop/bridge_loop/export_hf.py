"""Train with our loop where Megatron-Bridge exports the weights: export_hf.py CONFIG.json LOGITS.pt [OVERRIDE ...].

LOGITS.pt: what the trained model makes of `TOKENS`, [1, 16, vocabulary], from rank 0.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from tests.interop.absent_packages import stand_in_for
from tests.interop.bridge_loop import upstream_on_cpu

TOKENS = list(range(3, 19))


def main(config_file: Path, logits: Path, overrides: list[str]) -> None:
    from cloudai_mbridge.training import cpu

    cpu.install()
    cpu.import_megatron()
    from cloudai_mbridge.training.callbacks import CallbackManager
    from cloudai_mbridge.training.config import ConfigContainer
    from cloudai_mbridge.training.config.text.overrides import apply_overrides
    from cloudai_mbridge.training.gpt_step import forward_step
    from cloudai_mbridge.training.pretrain import pretrain

    upstream_on_cpu.import_core()
    stand_in_for(upstream_on_cpu.ABSENT)
    importlib.import_module("megatron.bridge.models.conversion.auto_bridge")
    layers: Any = importlib.import_module("megatron.bridge.peft.utils")
    layers.HAVE_TE = False  # no stand-in is a class of layers
    callbacks = CallbackManager()
    callbacks.register("on_train_end", lambda context: _write_logits(context.model, logits))
    pretrain(apply_overrides(ConfigContainer.from_yaml(config_file), overrides), forward_step, callbacks=callbacks)


def _write_logits(model: list[Any], path: Path) -> None:
    import torch
    import torch.distributed as dist

    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        model[0].eval()
        found = model[0](tokens, torch.arange(len(TOKENS))[None], None)
    if dist.get_rank() == 0:
        torch.save(found.float(), path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
