"""Datasets: lengths under both names, loader fields, and where samples come from."""

import copy
import warnings
from dataclasses import fields, replace
from typing import Any

import pytest

from tests.cases import every
from tests.golden import Sentence

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns while it is imported
    from cloudai_mbridge.training.config.dataset import (
        DataloaderConfig,
        DatasetBuildContext,
        DatasetProvider,
        GPTDatasetConfig,
        MockGPTDatasetConfig,
        blend_from_data_path,
    )
    from cloudai_mbridge.training.config.finetuning import (
        FinetuningDatasetConfig,
        GPTFIMDatasetConfig,
        PackedSequenceSpecs,
    )

MASKS = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
COMMON: dict[str, Any] = {"random_seed": 1, **MASKS}


def _gpt(**changes: Any) -> GPTDatasetConfig:
    return GPTDatasetConfig(**{"seq_length": 8, **COMMON, **changes})


# the data path


@every(
    ("data_path", "prefixes", "weights"),
    [
        ("a", ["a"], None),
        (["a"], ["a"], None),
        ("a b", ["a", "b"], None),
        ("a b c", ["a", "b", "c"], None),
        ("  a\n b\t", ["a", "b"], None),
        ("1 a", ["a"], [1.0]),
        ("30 a 70 b", ["a", "b"], [30.0, 70.0]),
        ("0 a 1e-3 b", ["a", "b"], [0.0, 0.001]),
        (["0.3", "a", "0.7", "b"], ["a", "b"], [0.3, 0.7]),
        ([0.3, "a", 0.7, "b"], ["a", "b"], [0.3, 0.7]),
        ("30 a b", ["30", "a", "b"], None),
        ("1", ["1"], None),
        ([" a "], ["a"], None),
        (["with space", "b"], ["with space", "b"], None),
        ("nan a", ["nan", "a"], None),
    ],
)
def test_data_path_becomes_a_blend(data_path: Any, prefixes: list[str], weights: list[float] | None) -> None:
    assert blend_from_data_path(data_path) == (prefixes, weights)


@every("data_path", [["30", "a", "b", "c"], "a b 70 c", "inf a 70 c", "-1 a 2 b", "0 a 0 b", "", "  ", []])
def test_a_data_path_that_says_two_things(sentence: Sentence, data_path: Any) -> None:
    """Megatron-Core takes the first of these for four paths: its check empties a lazy iterator before it ends."""
    with pytest.raises(AssertionError) as caught:
        blend_from_data_path(data_path)
    sentence(caught)
    with pytest.raises(AssertionError) as caught:
        _gpt(data_path=data_path, split="1,1,1").finalize()
    sentence(caught)


def test_finalize_derives_the_blend_from_the_data_path() -> None:
    config = _gpt(data_path="1 a 3 b", split="9,1,0")
    assert config.blend is None
    config.finalize()
    assert config.blend == (["a", "b"], [1.0, 3.0])
    assert config.mock is False
    assert config.split_matrix == [(0, 0.9), (0.9, 1.0), None]


@pytest.mark.parametrize(
    ("blend", "is_passed"),
    [((["b"], None), True), ((["a"], [1.0]), True), ((["a"], None), False), ([["a"], None], False)],
)
def test_a_blend_of_the_user_wins_over_the_data_path(
    blend: Any, is_passed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = _gpt(data_path="a", blend=blend, split="1,1,1")
    config.finalize()
    config.finalize()
    assert config.blend == blend
    assert ("data_path='a' is not read" in caplog.text) is is_passed


@pytest.mark.parametrize("copied", [False, True])
def test_a_new_data_path_after_finalize_counts(copied: bool) -> None:
    config = _gpt(data_path="a", split="1,1,1")
    config.finalize()
    config = copy.deepcopy(config) if copied else config
    config.data_path = "b"
    config.finalize()
    assert config.blend == (["b"], None)


# lengths and loader


def test_both_names_of_the_length() -> None:
    assert _gpt().sequence_length == 8
    assert _gpt(seq_length=None, sequence_length=16).seq_length == 16
    assert _gpt(seq_length=8, sequence_length=16).sequence_length == 8
    config = _gpt()
    config.seq_length = 32
    assert config.sequence_length == 32
    config.sequence_length = 64
    assert config.seq_length == 64


@every("cls", [GPTDatasetConfig, MockGPTDatasetConfig, GPTFIMDatasetConfig])
def test_no_length_at_all(cls: Any) -> None:
    with pytest.raises(ValueError, match="seq_length"):
        cls(**COMMON)


def test_positional_arguments_go_on_to_megatron_core() -> None:
    config = GPTDatasetConfig(8, False, ["a"], 1234, num_workers=3)
    assert (config.seq_length, config.random_seed, config.data_path, config.num_workers) == (8, 1234, ["a"], 3)
    assert config.skip_getting_attention_mask_from_dataset is False


def test_a_seed_is_required_and_an_unknown_field_refused() -> None:
    with pytest.raises(TypeError, match="random_seed"):
        GPTDatasetConfig(8)
    with pytest.raises(TypeError, match="num_worker"):
        _gpt(num_worker=1)


def test_loader_fields_are_split_off() -> None:
    config = _gpt(num_workers=5, dataloader_type="cyclic", drop_last=False)
    assert (config.num_workers, config.dataloader_type, config.drop_last, config.pin_memory) == (
        5,
        "cyclic",
        False,
        True,
    )
    assert isinstance(config, DataloaderConfig)


def test_every_field_that_can_be_given_is_an_attribute_once_made() -> None:
    for config in (_gpt(), MockGPTDatasetConfig(8, **COMMON), GPTFIMDatasetConfig(seq_length=8, **COMMON)):
        assert {field.name for field in fields(config) if field.init} <= vars(config).keys()


def test_no_workers_means_none_that_persist() -> None:
    specs: list[Any] = [DataloaderConfig(num_workers=0), _gpt(num_workers=0)]
    for config in [*specs, FinetuningDatasetConfig(seq_length=8, num_workers=0)]:
        assert config.persistent_workers is True
        config.finalize()
        assert config.persistent_workers is False
    one = DataloaderConfig(num_workers=1)
    one.finalize()
    assert one.persistent_workers is True


# rules of GPT datasets


def test_nothing_is_checked_before_finalize(sentence: Sentence) -> None:
    config = _gpt(fast_cache_load=True)
    with pytest.raises(AssertionError, match=r"dataset.fast_cache_load") as caught:
        config.finalize()
    sentence(caught)
    config.path_to_cache = "/cache"
    config.finalize()


@every(
    ("changes", "message"),
    [
        ({"defer_npy_index_mmap": True}, "dataset.defer_npy_index_mmap = True needs dataset.path_to_cache"),
        (
            {"fast_cache_load": True, "path_to_cache": "/c", "blend": (["a"], None), "split": "1"},
            "cannot be used together",
        ),
        ({"blend": (["a"], None)}, "split must be provided"),
        ({"data_path": "a"}, "split must be provided"),
        ({"blend": (["a"], [0.5, 0.5]), "split": "1,1,1"}, "equal in number"),
        ({"blend": (["a"], None), "blend_per_split": [(["a"], None), None, None]}, "incompatible"),
        ({"data_path": "a", "blend_per_split": [(["a"], None), None, None]}, "incompatible"),
        ({"blend_per_split": [(["a"], None)]}, "must contain 3 blends"),
        ({"reset_position_ids": None}, "reset_position_ids is needed"),
        ({"reset_attention_mask": None}, "reset_attention_mask is needed"),
        ({"eod_mask_loss": None}, "eod_mask_loss is needed"),
    ],
)
def test_rules_of_blended_datasets(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        _gpt(**changes).finalize()


def test_without_a_source_the_data_is_made_up() -> None:
    config = _gpt()
    config.finalize()
    assert (config.mock, config.split, config.tokenizer) == (True, "1,1,1", None)
    assert config.split_matrix is not None


def test_a_source_that_comes_later_ends_the_mock() -> None:
    config = _gpt()
    config.finalize()
    config.blend = (["a"], None)
    config.finalize()
    assert config.mock is False


def test_a_finalized_config_can_be_made_again_from_its_fields() -> None:
    for config in (
        _gpt(data_path="a", split="9,1,0"),
        MockGPTDatasetConfig(8, **COMMON),
        GPTFIMDatasetConfig(fim_rate=0.5, seq_length=8, **COMMON),
    ):
        config.finalize()
        again = replace(config)
        again.finalize()
        assert again == config
        config.finalize()
        assert again == config


# the classes on top


@every(
    ("changes", "names"),
    [
        ({"blend": (["a"], None)}, "no blend"),
        ({"blend_per_split": [(["a"], None), None, None]}, "no blend_per_split"),
        ({"blend": (["a"], None), "blend_per_split": [None, None, None]}, "no blend and no blend_per_split"),
        ({"data_path": "a"}, "no data_path"),
    ],
)
def test_a_mock_takes_no_source(changes: dict[str, Any], names: str) -> None:
    config = MockGPTDatasetConfig(8, **COMMON, **changes)
    with pytest.raises(TypeError, match=f"takes {names}$"):
        config.finalize()


def test_a_mock() -> None:
    config = MockGPTDatasetConfig(8, **COMMON, blend=None, blend_per_split=[], num_workers=0)
    config.finalize()
    assert not {"blend", "blend_per_split"} & vars(config).keys()
    assert (config.mock, config.blend, config.blend_per_split, config.persistent_workers) == (True, None, None, False)
    config.finalize()
    assert config.mock is True


def test_fill_in_the_middle() -> None:
    tokens = {"prefix": "<p>"}
    config = GPTFIMDatasetConfig(0.5, 0.25, tokens, "\n", 0.1, "#", seq_length=8, **COMMON, data_path="a", split="1")
    config.finalize()
    assert (config.fim_rate, config.fim_spm_rate, config.fim_extra_tokens) == (0.5, 0.25, tokens)
    assert (config.fim_split_sample, config.fim_fragment_rate, config.fim_no_prefix) == ("\n", 0.1, "#")
    assert (config.fim_data, config.blend) == (True, (["a"], None))
    assert config != replace(config, fim_rate=0.6)


def test_finetuning_draws_whole_batches() -> None:
    config = FinetuningDatasetConfig(seq_length=8, packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=64))
    config.finalize()
    assert config.dataloader_type == "batch"
    with pytest.raises(TypeError, match="seq_length"):
        FinetuningDatasetConfig()  # type: ignore[call-arg]


def test_a_provider_of_the_user() -> None:
    class Provider(DatasetProvider):
        def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, Any, Any]:
            return list(range(context.train_samples)), None, None

    provider = Provider(num_workers=0)
    provider.finalize()
    assert provider.persistent_workers is False
    assert provider.build_datasets(DatasetBuildContext(2, 0, 0)) == ([0, 1], None, None)
