"""The estimate of memory, against the numbers that Megatron-Bridge's formulas give for published models."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.nn.functional as F
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from cloudai_mbridge.training.reporting.theoretical_memory import (
    layers_by_rank,
    report_theoretical_memory,
    theoretical_memory,
)
from tests.cases import every

LLAMA3 = {"gated_linear_unit": True, "activation_func": F.silu, "seq_length": 8192, "num_query_groups": 8}
LLAMA3_8B = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
LLAMA3_70B = {"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64}
LLAMA31_405B = {"num_layers": 126, "hidden_size": 16384, "ffn_hidden_size": 53248, "num_attention_heads": 128}
QWEN3_30B = {
    **{"num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 32, "kv_channels": 128},
    **{"num_query_groups": 4, "num_moe_experts": 128, "moe_ffn_hidden_size": 768, "moe_router_topk": 8},
    **{"seq_length": 4096, "padded_vocab_size": 151936},
}
QWEN3_235B = QWEN3_30B | {
    **{"num_layers": 94, "hidden_size": 4096, "ffn_hidden_size": 12288, "num_attention_heads": 64},
    "moe_ffn_hidden_size": 1536,
}


def _cfg(model: dict[str, Any], dp: int, mbs: int = 1, sharded: bool = True, **layout: Any) -> Any:
    sizes = {name: layout.get(name, 1) for name in ("tp", "pp", "cp", "ep")}
    base: dict[str, Any] = {
        "tensor_model_parallel_size": sizes["tp"],
        "pipeline_model_parallel_size": sizes["pp"],
        "context_parallel_size": sizes["cp"],
        "expert_model_parallel_size": sizes["ep"],
        "expert_tensor_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": layout.get("vp"),
        "share_embeddings_and_output_weights": False,
        "sequence_parallel": True,
        "recompute_granularity": "selective",
        "kv_channels": None,
        "num_moe_experts": None,
        "moe_ffn_hidden_size": None,
        "moe_router_topk": 2,
        "moe_layer_freq": 1,
        "moe_shared_expert_intermediate_size": None,
        "padded_vocab_size": 128256,
    }
    return SimpleNamespace(
        model=SimpleNamespace(**{**base, **LLAMA3, **model}),
        train=SimpleNamespace(micro_batch_size=mbs),
        ddp=SimpleNamespace(use_distributed_optimizer=sharded),
        data_parallel_size=dp,
    )


@every(
    ("cfg", "num_microbatches", "weight", "activation"),
    [
        (_cfg(LLAMA3_8B, 8), None, 60228956160, 38730268672),
        (_cfg(LLAMA3_8B, 8, sharded=False), None, 144549494784, 38730268672),
        (_cfg(LLAMA3_70B | {"padded_vocab_size": 128512}, 2, tp=4, pp=8, vp=5), None, 28828440576, 50623725568),
        (_cfg(LLAMA3_70B | {"padded_vocab_size": 128512}, 2, tp=4, pp=8), 4, 28828440576, 21542010880),
        (_cfg(LLAMA31_405B | {"padded_vocab_size": 129024}, 8, tp=8, pp=8, cp=2, vp=8), None, 44145661824, 36424158720),
        (_cfg(QWEN3_30B, 8, mbs=8, ep=8), None, 76695042048, 116887126016),
        (_cfg(QWEN3_235B | {"padded_vocab_size": 152064}, 16, tp=2, pp=8, vp=4, ep=32), None, 20898117504, 28912545792),
    ],
)
def test_published_models(cfg: Any, num_microbatches: int | None, weight: int, activation: int) -> None:
    memory = theoretical_memory(cfg, num_microbatches)
    assert round(memory.weight_and_optimizer) == weight
    assert round(memory.activation) == activation


EQUAL = {"num_layers": 4, "padded_vocab_size": 4 * 14336}


@every(
    ("uneven", "layers"),
    [
        ({"num_layers_in_first_pipeline_stage": 1}, (1, 3)),
        ({"num_layers_in_last_pipeline_stage": 3}, (1, 3)),
        ({"account_for_embedding_in_pipeline_split": True, "num_layers": 3}, (1, 2)),
        ({"account_for_loss_in_pipeline_split": True, "num_layers": 3}, (2, 1)),
        ({"pipeline_model_parallel_layout": PipelineParallelLayerLayout("Et|tttL", 2)}, (1, 3)),
        ({"pipeline_model_parallel_layout": PipelineParallelLayerLayout("Et|t|t|tL", 2)}, (2, 2)),
    ],
)
def test_layers_of_uneven_stages(uneven: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert layers_by_rank(_cfg(LLAMA3_8B | EQUAL | uneven, 2, pp=2).model) == layers


def test_the_fullest_of_uneven_stages_counts() -> None:
    """Each stage of pp 2 has a table; the second holds one micro-batch at a time, the first two."""
    equal = theoretical_memory(_cfg(LLAMA3_8B | EQUAL, 2, pp=2))
    late = theoretical_memory(_cfg(LLAMA3_8B | EQUAL | {"num_layers_in_first_pipeline_stage": 1}, 2, pp=2))
    early = theoretical_memory(_cfg(LLAMA3_8B | EQUAL | {"num_layers_in_first_pipeline_stage": 3}, 2, pp=2))
    one_layer = 2 * 4096**2 * 1.25 + 4 * 4096 + 3 * 4096 * 14336
    assert late.weight_and_optimizer - equal.weight_and_optimizer == pytest.approx(one_layer * 12, rel=1e-4)
    assert late.weight_and_optimizer == early.weight_and_optimizer
    assert late.activation < equal.activation < early.activation


def test_weights_beside_adapters_have_no_states() -> None:
    cfg = _cfg(LLAMA3_8B, 8)
    whole = theoretical_memory(cfg)
    cfg.peft = SimpleNamespace()
    frozen = theoretical_memory(cfg)
    assert frozen.weight_and_optimizer == 2 * frozen.parameters
    assert (frozen.parameters, frozen.activation) == (whole.parameters, whole.activation)


def test_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = _cfg(LLAMA3_8B, 8)
    report_theoretical_memory(cfg)
    footprint = "Theoretical memory footprints: weight and optimizer=57438.81 MB"
    assert capsys.readouterr().out == f"{footprint}, activation=36936.06 MB, total=94374.87 MB\n"
    cfg.model.sequence_parallel = False
    report_theoretical_memory(cfg, verbose=True)
    assert capsys.readouterr().out == f"Number of parameters in billions: 8.03\n{footprint}\n"
    assert theoretical_memory(cfg).parameters == 8030527488
