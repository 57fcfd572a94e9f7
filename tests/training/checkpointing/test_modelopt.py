"""A model that NVIDIA's ModelOpt has quantized trains on, and its checkpoints keep what ModelOpt made of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader

from cloudai_mbridge.training.resilience import packages
from cloudai_mbridge.training.schema import packages as of_settings

RESTORED = "model.restore_modelopt_state=true"

# Quantize the model of the newest checkpoint in `first`, and save it to `quantized` as ModelOpt's users do
QUANTIZE = """
    import json
    from pathlib import Path

    def quantize():
        import torch
        import torch.distributed as dist
        import modelopt.torch.quantization as mtq
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

    if __name__ == "__main__":  # Megatron-Core imports it once more, in a process of its own
        quantize()
"""


def ranges(directory: Path) -> dict[str, Any]:
    """Return the largest values that the quantizers of a checkpoint's model take."""
    entries = FileSystemReader(directory).read_metadata().state_dict_metadata
    values = {key: torch.empty(each.size) for key, each in entries.items() if key.endswith("_amax")}
    torch.distributed.checkpoint.load(values, storage_reader=FileSystemReader(directory), no_dist=True)
    return values


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # `ranges` reads without it
@pytest.mark.process
@pytest.mark.skipif(not packages.is_installed(of_settings.MODELOPT), reason="nvidia-modelopt is not installed")
def test_a_quantized_model_is_restored_trained_and_resumed(train: Any, ranks: Any, tmp_path: Path) -> None:
    plain = train(1, None, "train.train_iters=4")
    ranks(1, QUANTIZE, is_quick=False)
    start = {"checkpoint": {"pretrained_checkpoint": "quantized", "save": "saved", "save_interval": 2}}
    made = train(1, start, RESTORED, "train.train_iters=4").losses
    assert made != plain.losses, "the products are not quantized"
    assert made == pytest.approx(plain.losses, abs=0.02)
    assert (tmp_path / "saved/iter_0000004/modelopt_state").is_dir()
    quantizers, trained = (ranges(tmp_path / name) for name in ("quantized/release", "saved/iter_0000004"))
    assert quantizers.keys() == trained.keys() != set()
    assert all(value.equal(trained[name]) for name, value in quantizers.items())
    resumed = {"checkpoint": {"load": "saved", "ckpt_step": 2}}
    assert list(train(1, resumed, RESTORED, "train.train_iters=4").losses.items()) == list(made.items())[2:]
    without = train(1, {"checkpoint": {"save": "plain"}}, "train.train_iters=2")
    assert without.returncode == 0
    refused = train(1, {"checkpoint": {"load": "plain"}}, RESTORED, code=None)
    assert "holds no modelopt_state of a converted model; set checkpoint.load" in refused.stderr
    assert refused.returncode


# Write the states that ModelOpt 0.47 leaves beside the weights, by Megatron-Core alone, and look for each
FIND = """
    import sys
    from pathlib import Path
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from cloudai_mbridge.training import cpu
    from cloudai_mbridge.training.checkpointing.load import _find_converted
    from cloudai_mbridge.training.checkpointing.save import forked_results
    from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
    from cloudai_mbridge.training.errors import CheckpointError

    def save(tree, directory):
        Path(directory).mkdir(parents=True)
        with cpu.megatron_device(), forked_results():
            dist_checkpointing.save(tree, directory, ("torch_dist", 1))

    cpu.install()
    dist.init_process_group("gloo", rank=0, world_size=1, init_method="file://" + sys.argv[1])
    quantized = {"quant_cfg": [{"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": 8, "axis": 0}}]}
    modes = {
        "converted": [("kd_loss", {}), ("quantize", {"config": {**quantized, "algorithm": "max"}, "metadata": {}})],
        "distilled": [("kd_loss", {"config": {}, "metadata": {}})],
        "plain": None,
    }
    for name, converted in modes.items():
        save({"step": 1}, name + "/release")
        if converted is not None:
            state = {"modelopt_state_dict": converted, "modelopt_version": "0.47.0"}
            save(state, name + "/release/modelopt_state")
        try:
            print(name, _find_converted(CheckpointConfig(pretrained_checkpoint=name)))
        except CheckpointError as error:
            print(name, error)
    dist.destroy_process_group()
"""


@pytest.mark.process
def test_states_of_a_checkpoint_are_told_apart_without_the_package(ranks: Any, tmp_path: Path) -> None:
    converted, distilled, plain = ranks(1, FIND, str(tmp_path / "meeting_point")).stdout.splitlines()[-3:]
    assert converted == "converted converted/release"
    for line, name in ((distilled, "distilled"), (plain, "plain")):
        assert f"{name} {name}/release: holds no modelopt_state of a converted model; set checkpoint.load" in line
