"""The program of a rehearsal, as another process starts it: lines of JSON, one for each rank that it builds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.recipes.container import container_data

pytestmark = pytest.mark.process
MODEL = {
    "num_layers": 8,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 131072,
    "seq_length": 8192,
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 2,
    "sequence_parallel": True,
}


def rehearse(directory: Path, model: dict[str, Any], world: int = 1024) -> tuple[int, list[dict[str, Any]]]:
    sections = {
        "model": MODEL | model,
        "train": {"train_iters": 1, "micro_batch_size": 1, "global_batch_size": 1024},
        "optimizer": {"lr": 1e-3},
        "scheduler": {},
    }
    config = directory / "training.json"
    config.write_text(json.dumps(container_data(sections)))
    return run_program(config, world)


def run_program(config: Path, world: int, *options: str) -> tuple[int, list[dict[str, Any]]]:
    words = ["-m", "cloudai_mbridge.training.dry", "--config", str(config), "--world", str(world), "--gpu", "h100"]
    words += options
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_every_distinct_rank_is_built_at_its_true_size(tmp_path: Path) -> None:
    code, events = rehearse(tmp_path, {})
    start, configured, *built, tiled = events
    assert (code, start["event"], configured["event"]) == (0, "start", "configured")
    assert configured["layout"] == {"tp": 4, "cp": 1, "pp": 2, "dp": 128, "ep": 1, "etp": 4}
    assert configured["ranks"] == [0, 253, 511, 512, 765, 1023]
    assert {event["event"] for event in built} == {"built"}
    # and those that save the shards
    assert [event["rank"] for event in built] == [0, 1, 2, 3, 253, 511, 512, 513, 514, 515, 765, 1023]
    assert [event["place"]["pp"] for event in built] == [0] * 6 + [1] * 6
    assert (tiled["event"], tiled["problems"]) == ("tiled", [])
    layer = (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 4096 * 14336) // 4 + 2 * 4096
    embedding = 131072 * 4096 // 4
    first, last = built[0], built[-1]
    assert first["parameters"]["count"] == 4 * layer + embedding
    assert last["parameters"]["count"] == 4 * layer + embedding + 4096
    assert (first["layers"], last["layers"]) == ([[1, 2, 3, 4]], [[5, 6, 7, 8]])
    assert all(event["peak_mib"] < 1024 for event in built)


def test_a_refusal_has_the_engines_words_the_stage_and_the_key(tmp_path: Path) -> None:
    code, events = rehearse(tmp_path, {"num_layers": 9})
    refused = events[-1]
    assert (code, refused["event"], refused["stage"]) == (1, "refused", "model")
    assert "num_layers" in refused["message"]
    assert "model.num_layers" in refused["keys"]
