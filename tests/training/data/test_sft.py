"""Fine-tuning data as Megatron-Bridge 0.6 configures them: from its own YAML to the samples of the earlier class."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.golden import Sentence

pytest.importorskip("torch")

from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig, PackedSequenceSpecs
from cloudai_mbridge.training.config.sft import GPTSFTDatasetConfig
from cloudai_mbridge.training.config.text.serialization import from_dict
from cloudai_mbridge.training.config.text.yaml_text import parse_yaml
from cloudai_mbridge.training.data.finetuning import check_finetuning, collate_for, is_packed
from cloudai_mbridge.training.errors import ConfigError
from tests.cases import every
from tests.training.data.test_finetuning_files import SHIPPED, TRAIN_ONLY, build, container

# As a recipe of Megatron-Bridge 0.6 writes it
YAML = """
_target_: megatron.bridge.data.builders.gpt_sft.GPTSFTDatasetConfig
data_sharding: true
dataloader_type: batch
dataset_kwargs: {pad_to_max_length: true}
dataset_root: null
do_test: false
do_validation: true
enable_offline_packing: true
hf_dataset:
  _target_: megatron.bridge.data.sources.hf.HFDatasetSourceConfig
  dataset_name: squad
  adapter_kwargs: null
hf_output_root: null
hf_rewrite: false
hf_validation_proportion: 0.1
num_workers: 1
offline_packing_specs:
  _target_: megatron.bridge.data.packing.config.PackedSequenceSpecs
  max_single_sequence_length: null
  packed_sequence_size: 128
  pad_cu_seqlens: true
  pad_seq_to_mult: 1
preprocessing:
  _target_: megatron.bridge.data.sft_processing.PromptCompletionSFTPreprocessingConfig
  add_bos: false
  add_eos: true
  add_sep: false
  completion_column: output
  loss_mode: completion
  prompt_column: input
  prompt_template: '{prompt}'
  separator: ' '
  strip_whitespace: true
  truncation_method: right
seed: 5678
seq_length: 128
"""
LOCAL = {"dataset_root": str(SHIPPED), "hf_dataset": None, "hf_validation_proportion": None}


def configured(**fields: Any) -> Any:
    config = container()
    config.dataset = from_dict(GPTSFTDatasetConfig, {**parse_yaml(YAML), **fields})
    config.dataset.finalize()
    check_finetuning(config)
    return config


def test_the_samples_are_those_of_the_earlier_class() -> None:
    config, earlier = configured(**LOCAL), container(seq_length=128, seed=5678)
    earlier.dataset.packed_sequence_specs = PackedSequenceSpecs(packed_sequence_size=128, pad_cu_seqlens=True)
    assert isinstance(config.dataset, FinetuningDatasetConfig)
    assert is_packed(config.dataset)
    (train, *_), (expected, *_) = (build(each, TRAIN_ONLY) for each in (config, earlier))
    assert (train.rows == expected.rows).all()
    assert repr(collate_for(config, train)) == repr(collate_for(earlier, expected))


def test_columns_and_spaces(tmp_path: Path) -> None:
    (tmp_path / "training.jsonl").write_text('{"ask": " a b ", "tell": " c "}\n')
    preprocessing = {**parse_yaml(YAML)["preprocessing"], "prompt_column": "ask", "completion_column": "tell"}
    plain = {"enable_offline_packing": False, "offline_packing_specs": None, "preprocessing": preprocessing}
    train, *_ = build(configured(**LOCAL | plain | {"dataset_root": str(tmp_path)}), TRAIN_ONLY)
    sample = train[0]
    assert bytes(sample["tokens"].tolist()) == b"a b c"
    assert bytes(sample["labels"][sample["loss_mask"]].tolist()) == b" c\0"


@every("fields", [{"adapter_kwargs": {"data_root": "/d"}}, {"subset": "main"}, {"schema_adapter": "gsm8k"}])
def test_settings_of_a_source_that_would_have_no_effect(sentence: Sentence, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        configured(hf_dataset={**parse_yaml(YAML)["hf_dataset"], **fields})
    sentence(caught)


class Rows(list[Any]):
    """As much of a data set of Hugging Face as is used."""

    @classmethod
    def from_list(cls, rows: list[Any]) -> "Rows":
        return cls(rows)

    def train_test_split(self, test_size: float, seed: int) -> dict[str, "Rows"]:
        assert seed == 5678
        cut = len(self) - round(len(self) * test_size)
        return {"train": Rows(self[:cut]), "test": Rows(self[cut:])}


def test_rows_of_hugging_face_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*names: str, split: str) -> Rows:
        asked.append((*names, split))
        return Rows({"context": f"C{i}", "question": "Q", "answers": {"text": [f"A{i}", "B"]}} for i in range(20))

    module = ModuleType("datasets")
    vars(module).update(load_dataset=load_dataset, Dataset=Rows, __spec__=pytest.__spec__)
    monkeypatch.setitem(sys.modules, "datasets", module)
    config = configured(hf_output_root=str(tmp_path / "squad"))
    train, valid, test = build(config)
    assert asked == [("rajpurkar/squad", "train")]
    lines = [json.loads(line) for line in (tmp_path / "squad/training.jsonl").read_text().splitlines()]
    assert len(lines) == 18
    assert lines[0] == {"input": "Context: C0 Question: Q Answer:", "output": "A0"}
    assert len(train) > len(valid) >= 1
    assert test is None
    build(config)
    assert len(asked) == 1


@every(
    "fields",
    [
        {"dataset_root": "/data"},
        {"hf_dataset": {"dataset_name": "raven"}},
        {"preprocessing": {"_target_": "ChatSFTPreprocessingConfig", "loss_mode": "last_turn"}},
        {**LOCAL, "enable_offline_packing": False},
        {**LOCAL, "dataset_kwargs": {"add_bos": True}},
    ],
)
def test_refused(sentence: Sentence, fields: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, ValueError)) as caught:
        configured(**fields)
    sentence(caught)
