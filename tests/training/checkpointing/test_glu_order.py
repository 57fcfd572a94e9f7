"""Gated products that layers hold in blocks by turns are saved as Megatron-Bridge saves them: the gate first."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from cloudai_mbridge.training.checkpointing import content
from cloudai_mbridge.training.checkpointing.layout import RUN_CONFIG
from cloudai_mbridge.training.errors import CheckpointError
from tests.golden import Sentence

BY_TURNS = torch.tensor([0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11.0])  # of 6 rows of each, in blocks of 2
NAME = "decoder.layers.0.mlp.experts.linear_fc1."


class TEGroupedMLP(torch.nn.Module):
    """Stands for Megatron-Core's class of that name, which needs Transformer Engine."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**{"gated_linear_unit": True, "moe_mlp_glu_interleave_size": 2, **fields})


def chunk(**fields: Any) -> Any:
    experts: Any = torch.nn.ModuleDict({"experts": TEGroupedMLP(**fields)})
    layer: Any = torch.nn.ModuleDict({"mlp": experts})
    return torch.nn.ModuleDict({"decoder": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})})


def test_weights_are_in_order_in_files_and_by_turns_in_layers() -> None:
    weight = torch.nn.Parameter(BY_TURNS[:, None].repeat(1, 3))
    tree = {
        f"{NAME}weight0": ShardedTensorFactory("w", weight, lambda *_: {}, lambda loaded: loaded),
        f"{NAME}bias1": ShardedTensor.from_rank_offsets("b", BY_TURNS),
        f"{NAME}_extra_state": "state",
        f"{NAME}adapter.linear_out.weight": "adapter",
        f"{NAME.replace('fc1', 'fc2')}weight0": "second",
    }
    made = content.rows_for_files({"model": tree}, [chunk()])["model"]
    values = {name: getattr(value, "data", value) for name, value in made.items()}
    assert values[f"{NAME}weight0"].equal(torch.arange(12.0)[:, None].repeat(1, 3))
    assert values[f"{NAME}bias1"].equal(torch.arange(12.0))
    assert weight[:, 0].equal(BY_TURNS), "the layer's own weights were moved"
    assert list(values.values())[2:] == ["state", "adapter", "second"]
    back = content.rows_for_layers({"model": values}, [chunk()])["model"]
    assert back[f"{NAME}weight0"].equal(weight)
    assert back[f"{NAME}bias1"].equal(BY_TURNS)


@pytest.mark.parametrize("fields", [{"moe_mlp_glu_interleave_size": None}, {"gated_linear_unit": False}])
def test_other_layers_are_left_alone(fields: dict[str, Any]) -> None:
    tree = {f"{NAME}weight0": BY_TURNS}
    assert content.rows_for_files({"model": tree}, [chunk(**fields)])["model"][f"{NAME}weight0"] is BY_TURNS


def test_state_of_the_optimizer_in_another_order_is_refused(tmp_path: Path, sentence: Sentence) -> None:
    experts = {"num_moe_experts": 2, "moe_mlp_glu_interleave_size": 32}
    content.check_row_order(str(tmp_path), SimpleNamespace(**experts))  # no configuration beside it
    (tmp_path / RUN_CONFIG).write_text("model: {num_moe_experts: 2, moe_mlp_glu_interleave_size: 32}\n")
    content.check_row_order(str(tmp_path), SimpleNamespace(**experts))
    with pytest.raises(CheckpointError, match=r"moe_mlp_glu_interleave_size") as caught:
        content.check_row_order(str(tmp_path), SimpleNamespace(num_moe_experts=2))
    sentence(caught)
