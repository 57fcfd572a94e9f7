"""Attention that ends with a document: by a mask of the data set, by the bounds of its documents, over layouts."""

from pathlib import Path
from typing import Any

import pytest

from tests.golden import Sentence

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # noqa: E402

from cloudai_mbridge.training.config import ConfigContainer  # noqa: E402
from cloudai_mbridge.training.errors import ConfigError  # noqa: E402
from cloudai_mbridge.training.startup import unsupported  # noqa: E402
from cloudai_mbridge.training.startup.prepare import refuse_unsupported  # noqa: E402
from tests.training.conftest import Train  # noqa: E402

# Megatron-Core's writer of data sets, with numpy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

LENGTH, END = 16, 511  # the last id of the vocabulary ends a document
MODEL = {"num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 32, "seq_length": LENGTH, "init_method_std": 0.3}
DATA = {
    "_target_": "GPTDatasetConfig",
    "random_seed": 5,
    "split": "100,0,0",
    "data_path": "documents",
    "num_workers": 0,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
}
CAUSAL = {"create_attention_mask": True, "skip_getting_attention_mask_from_dataset": False}
MASKS = {**CAUSAL, "reset_attention_mask": True}


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, Any]:
    """Write a corpus of short documents; return sections that train on it."""
    random = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(str(tmp_path / "documents.bin"), dtype=np.uint16)
    for _ in range(200):
        length = int(random.integers(2, 9))
        tokens = np.append(random.integers(0, END, length), END)
        builder.add_document(torch.from_numpy(tokens.astype(np.int64)), [len(tokens)])
    builder.finalize(str(tmp_path / "documents.idx"))
    train = {"train_iters": 3, "micro_batch_size": 1, "global_batch_size": 4}
    return {"model": MODEL, "train": train, "optimizer": {"lr": 1e-2, "min_lr": 1e-2}, "dataset": DATA}


@pytest.mark.kept_ranks
@pytest.mark.process
def test_a_mask_reaches_every_stage_and_every_part_of_a_sequence(train: Train, sections: dict[str, Any]) -> None:
    masked = {**sections, "dataset": {**DATA, **MASKS}}
    one, whole = train(1, masked).losses, train(1, sections).losses
    assert max(abs(one[step] - whole[step]) for step in one) > 1e-2, "documents see each other without a mask"
    stages = train(3, {**masked, "model": {**MODEL, "pipeline_model_parallel_size": 3}})
    assert stages.losses == pytest.approx(one, abs=1e-5)
    parts = train(2, {**masked, "model": {**MODEL, "context_parallel_size": 2}})
    assert parts.losses == pytest.approx(one, abs=1e-5)
    causal = {**sections, "dataset": {**DATA, **CAUSAL}}
    assert train(1, causal).losses == pytest.approx(whole, abs=1e-5)


def test_what_masks_nothing_is_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    config = ConfigContainer.from_dict(tiny({"dataset": {**DATA, **MASKS, "sequence_length": LENGTH}}))
    refuse_unsupported(config)
    monkeypatch.setattr(unsupported, "has_transformer_engine", lambda: True)
    with pytest.raises(ConfigError, match=r"reset_attention_mask") as caught:
        refuse_unsupported(config)
    sentence(caught)
    monkeypatch.undo()
    for field, value in (("create_attention_mask", False), ("skip_getting_attention_mask_from_dataset", True)):
        other = ConfigContainer.from_dict(tiny({"dataset": {**DATA, **MASKS, "sequence_length": LENGTH, field: value}}))
        with pytest.raises(ConfigError, match=r"reset_attention_mask") as caught:
            refuse_unsupported(other)
        sentence(caught)


@pytest.mark.kept_ranks
@pytest.mark.process
@pytest.mark.skipif(not hasattr(GPTDatasetConfig, "inter_document_masking"), reason="needs Megatron-Core 0.19")
def test_bounds_of_documents_are_such_a_mask(train: Train, sections: dict[str, Any], tiny: Any) -> None:
    bounded = {**sections, "dataset": {**DATA, "inter_document_masking": True}}
    masked = train(1, {**sections, "dataset": {**DATA, **MASKS}}).losses
    assert train(1, bounded).losses == pytest.approx(masked, abs=1e-5)
    stages = {**bounded, "model": {**MODEL, "pipeline_model_parallel_size": 3}}
    assert train(3, stages).losses == pytest.approx(masked, abs=1e-5)
    for path in ("train.micro_batch_size", "validation.eval_micro_batch_size", "model.context_parallel_size"):
        config = ConfigContainer.from_dict(tiny(bounded))
        section, _, field = path.partition(".")
        setattr(getattr(config, section), field, 2)
        with pytest.raises(ConfigError, match=rf"{path} = 2 with dataset.inter_document_masking = True \(use 1\)"):
            refuse_unsupported(config)
