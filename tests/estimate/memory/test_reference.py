"""The two reference estimators give the golden values of Megatron-Bridge, to the byte."""

from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import architecture
from cloudai_mbridge.estimate.memory.estimate import REFERENCES, head, seed
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.recipes import load_recipe
from tests.golden import Sentence

# recipe, layout, weights and optimizer by seed and by head, activations by seed and by head; None: no golden value
LLAMA_8B = {"num_gpus": 8, "seq_length": 8192}
LLAMA_70B = {"num_gpus": 64, "tp": 4, "pp": 8, "seq_length": 8192}
LLAMA_405B = {"num_gpus": 1024, "tp": 8, "pp": 8, "cp": 2, "vp": 8, "seq_length": 8192}
QWEN_30B = {"num_gpus": 8, "ep": 8, "etp": 1, "mbs": 8, "seq_length": 4096}
QWEN_235B = {"num_gpus": 256, "tp": 2, "pp": 8, "vp": 4, "ep": 32, "etp": 1, "seq_length": 4096}


@pytest.mark.parametrize(
    ("recipe", "layout", "weights", "activations"),
    [
        ("llama3_8b", LLAMA_8B, (60228956160, 60228956160), (38730268672, 38730268672)),
        ("llama3_8b", {**LLAMA_8B, "use_distributed_optimizer": False}, (144549494784, 144549494784), (None, None)),
        ("llama3_70b", {**LLAMA_70B, "vp": 5}, (28828440576, None), (50623725568, None)),
        ("llama3_70b", {**LLAMA_70B, "gbs": 8}, (28828440576, None), (21542010880, None)),
        ("llama31_405b", LLAMA_405B, (49050735360, 44145661824), (72848317440, 36424158720)),
        ("qwen3_30b_a3b", QWEN_30B, (1750926981120, 76695042048), (None, 116887126016)),
        ("qwen3_235b_a22b", QWEN_235B, (771380737920, 20898117504), (None, 28912545792)),
    ],
)
def test_golden_values(
    recipe: str,
    layout: dict[str, int],
    weights: tuple[int | None, int | None],
    activations: tuple[int | None, int | None],
) -> None:
    # the reference pads every vocabulary
    model = architecture(load_recipe(recipe), extra={"model.should_pad_vocab": "true"})
    for estimate, golden_weights, golden_activation in zip((seed, head), weights, activations, strict=True):
        got = estimate(model, ParallelLayout(**layout))
        assert golden_weights in (None, round(got.weight_and_optimizer)), estimate.__name__
        assert golden_activation in (None, round(got.activation)), estimate.__name__


def test_parameters_and_the_printed_line() -> None:
    estimate = REFERENCES["megatron-bridge/seed"](architecture(load_recipe("llama3_8b")), ParallelLayout(**LLAMA_8B))
    assert round(estimate.parameters) == 8030527488
    assert estimate.line() == (
        "Theoretical memory footprints: weight and optimizer=57438.81 MB, activation=36936.06 MB, total=94374.87 MB"
    )


@pytest.mark.parametrize("estimator", REFERENCES.values(), ids=REFERENCES)
def test_stages_of_their_own_size_are_refused(sentence: Sentence, estimator: Any) -> None:
    model = architecture(load_recipe("llama3_8b"), extra={"model.num_layers_in_first_pipeline_stage": "5"})
    with pytest.raises(BadInput) as caught:
        estimator(model, ParallelLayout(num_gpus=4, pp=4))
    sentence(caught)
