"""Groups of a grid of ranks, handed to Megatron-Core function by function: the losses of its own groups."""

from typing import Any

import pytest

pytest.importorskip("torch")

from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.startup import unsupported
from cloudai_mbridge.training.startup.prepare import refuse_unsupported
from tests.training.conftest import Train

GRID = {"use_decentralized_pg": True, "use_gloo_process_groups": False}
SMALL = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 32, "seq_length": 16}
STAGES = {"pipeline_model_parallel_size": 2, "share_embeddings_and_output_weights": True}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "expert_model_parallel_size": 2}


@pytest.mark.process
@pytest.mark.parametrize(
    "layout",
    [{**STAGES, "tensor_model_parallel_size": 2}, {**EXPERTS, "context_parallel_size": 2}],
    ids=["tp2-pp2", "cp2-ep2"],
)
def test_the_losses_of_global_groups(train: Train, layout: dict[str, Any]) -> None:
    """Also in a run that goes on with the other groups."""
    checkpoint = {"save": "ckpt", "load": "ckpt"}
    sections = {
        "model": {**SMALL, **layout},
        "train": {"train_iters": 4, "exit_interval": 2, "micro_batch_size": 1, "global_batch_size": 4},
        "optimizer": {"lr": 1e-2, "min_lr": 1e-2, "use_distributed_optimizer": True},
    }
    whole = train(4, {**sections, "train": {**sections["train"], "exit_interval": 4}})
    first = train(4, {**sections, "checkpoint": checkpoint, "dist": GRID})
    assert first.losses | train(4, {**sections, "checkpoint": checkpoint}).losses == whole.losses
    assert first.records[1]["grad_norm"] == whole.records[1]["grad_norm"]


def test_what_the_grid_has_no_settings_for(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported, "_lacking", set)
    config = ConfigContainer.from_dict(tiny({"dist": GRID}))
    refuse_unsupported(config)
    config.dist.use_tp_pp_dp_mapping = config.dist.use_sharp = True
    with pytest.raises(ConfigError, match=r"dist.use_tp_pp_dp_mapping = True with .* \(use False\); dist.use_sharp = "):
        refuse_unsupported(config)
