"""A model that NVIDIA's ModelOpt has quantized trains on, and its checkpoints keep what ModelOpt made of it."""

from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.training.resilience import packages

RESTORED = "model.restore_modelopt_state=true"

# Quantize the model of the newest checkpoint in `first`, and save it to `quantized` as ModelOpt's users do
QUANTIZE = """
    import json
    import torch
    import torch.distributed as dist
    import modelopt.torch.quantization as mtq
    from pathlib import Path
    from modelopt.torch.opt.plugins.mcore_dist_checkpointing import save_sharded_modelopt_state
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model
    from cloudai_mbridge.training import cpu
    from cloudai_mbridge.training.config.container import ConfigContainer
    from cloudai_mbridge.training.initialize import initialize
    from cloudai_mbridge.training.setup import build_model
    from cloudai_mbridge.training.startup.prepare import prepare
    cpu.install()
    config = ConfigContainer.from_dict(json.loads(Path("config.json").read_text()))
    prepare(config)
    initialize(config)
    with cpu.megatron_device():
        (model,) = unwrap_model(build_model(config))
        tokens = torch.arange(64)[None]
        mtq.quantize(model, mtq.INT8_DEFAULT_CFG, lambda model: model(tokens, tokens, None))
        directory = "quantized/release"
        Path(directory).mkdir(parents=True)
        dist_checkpointing.save({"model": model.sharded_state_dict()}, directory)
        save_sharded_modelopt_state([model], directory, ("torch_dist", 1))
    dist.destroy_process_group()
"""


@pytest.mark.process
@pytest.mark.skipif(not packages.is_installed(packages.MODELOPT), reason="nvidia-modelopt is not installed")
def test_a_quantized_model_is_restored_trained_and_resumed(train: Any, ranks: Any, tmp_path: Path) -> None:
    plain = train(1, None, "train.train_iters=4")
    ranks(1, QUANTIZE, is_quick=False)
    start = {"checkpoint": {"pretrained_checkpoint": "quantized", "save": "saved", "save_interval": 2}}
    made = train(1, start, RESTORED, "train.train_iters=4").losses
    assert made != plain.losses, "the products are not quantized"
    assert made == pytest.approx(plain.losses, abs=0.02)
    assert (tmp_path / "saved/iter_0000004/modelopt_state").is_dir()
    resumed = {"checkpoint": {"load": "saved", "ckpt_step": 2}}
    assert list(train(1, resumed, RESTORED, "train.train_iters=4").losses.items()) == list(made.items())[2:]
    without = train(1, {"checkpoint": {"save": "plain"}}, "train.train_iters=2")
    assert without.returncode == 0
    refused = train(1, {"checkpoint": {"load": "plain"}}, RESTORED, code=None)
    assert "holds no modelopt_state of a converted model; set checkpoint.load" in refused.stderr
    assert refused.returncode
