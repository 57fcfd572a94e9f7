"""The FLOPs of a step: of full sequences, and of packed ones by their own lengths."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cloudai_mbridge.estimate.architecture import architecture
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.config.finetuning import PackedSequenceSpecs
from cloudai_mbridge.training.flops import flops_per_token, num_floating_point_operations
from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider
from cloudai_mbridge.training.reporting import reports
from tests.training.conftest import run_ranks
from tests.training.data.reading import BYTES
from tests.training.data.test_finetuning_files import SHIPPED, TRAIN_ONLY, build, container

MODEL = GPTModelProvider(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=32,
    vocab_size=512,
    seq_length=64,
    gated_linear_unit=True,
)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two data-parallel replicas train eight sequences: what Megatron would answer."""
    monkeypatch.setattr(reports, "get_current_running_global_batch_size", lambda: 8)
    monkeypatch.setattr(reports.mpu, "get_data_parallel_world_size", lambda: 2)


def state_of(packed: tuple[int, int] | None = None) -> SimpleNamespace:
    return SimpleNamespace(cfg=SimpleNamespace(model=MODEL), packed=SimpleNamespace(of_step=packed))


def test_the_model_is_the_recipes() -> None:
    assert flops_per_token(MODEL) == flops_per_token(architecture(load_recipe("gpt_tiny")))


def test_a_step_of_full_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "get_current_running_global_batch_size", lambda: 8)
    assert reports.flops_per_step(state_of()) == 8 * 64 * flops_per_token(MODEL)
    assert reports.flops_per_step(state_of(), 32) == 8 * 32 * flops_per_token(MODEL, seq_length=32)
    assert reports.flops_of_batch(MODEL, 8, 32) == reports.flops_per_step(state_of(), 32)


@pytest.mark.parametrize("times", [1, 2], ids=["counted-once", "counted-twice"])
def test_a_step_of_packed_sequences(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Eight packs of 64 tokens, each of two sequences of 32."""
    monkeypatch.setattr(reports, "get_current_running_global_batch_size", lambda: 8)
    counted = state_of((512 * times, 16 * 32**2 * times))
    expected = num_floating_point_operations(counted.cfg, 8, 512, 16 * 32**2)
    assert reports.flops_per_step(counted) == expected == 512 * flops_per_token(MODEL, seq_length=32)


@pytest.mark.process
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        *(
            (1, {}),
            (2, {}),
            (2, {"pipeline_model_parallel_size": 2}),
            (2, {"context_parallel_size": 2, "calculate_per_token_loss": True}),
        ),
        (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    ],
    ids=["one", "dp2", "pp2", "cp2", "pp2-vp2"],
)
def test_the_rate_of_packed_sequences(tiny: Any, tmp_path: Path, ranks: int, layout: dict[str, Any]) -> None:
    """The first and second step have the first four packs."""
    specs = {"_target_": "PackedSequenceSpecs", "packed_sequence_size": 64, "pad_seq_to_mult": 4}
    data = {"seq_length": 64, "dataset_root": str(SHIPPED), "dataloader_type": "single"}
    train = {"train_iters": 2, "micro_batch_size": 1, "global_batch_size": 2}
    given = tiny({"model": layout, "train": train, "validation": {"eval_iters": 0}})
    given["dataset"] = {"_target_": "FinetuningDatasetConfig", **data, "packed_sequence_specs": specs}
    given["tokenizer"] = BYTES
    (tmp_path / "config.json").write_text(json.dumps(given))
    done = run_ranks(ranks, ["-m", "cloudai_mbridge.training", "--config", "config.json"], tmp_path)
    packing = PackedSequenceSpecs(packed_sequence_size=64, pad_seq_to_mult=4)
    own = container(seq_length=64, packed_sequence_specs=packing)
    packs = [np.diff(build(own, TRAIN_ONLY)[0][index]["cu_seqlens"]).tolist() for index in range(4)]
    assert any(len(pack) > 2 for pack in packs)
    model = SimpleNamespace(model=ConfigContainer.from_dict(given).model)
    model.model.kv_channels = 16
    for record, two in zip(done.records, (packs[:2], packs[2:]), strict=True):
        flops = num_floating_point_operations(model, 2, 128, sum(s * s for pack in two for s in pack))
        assert record["tflops_per_gpu"] == pytest.approx(flops / record["step_time_s"] / ranks / 1e12)
    assert '"flops_per_step": null, "flops_formula": "megatron-bridge/new, by the lengths of packed' in done.stdout
