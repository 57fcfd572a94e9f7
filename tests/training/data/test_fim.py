"""Fill in the middle: what is moved, what stays, and what is refused. `test_iterators.py` reads whole data sets."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from cloudai_mbridge.training.config import GPTFIMDatasetConfig
from cloudai_mbridge.training.data.gpt import check_fim, permuter
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.tokenizers.config import TokenizerConfig
from cloudai_mbridge.training.tokenizers.tokenizer import build_tokenizer
from tests.cases import every
from tests.golden import Sentence
from tests.training.conftest import Train

# Megatron-Core's writer of data sets, with numpy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

BYTES = {"metadata_path": {"library": "byte-level"}, "vocab_size": 256}
MARKED: dict[str, Any] = {**BYTES, "special_tokens": ["<p>", "<m>", "<s>", "<f>"]}
P, M, S, F, END, PAD = 259, 258, 257, 256, 0, 1
EXTRA = {"prefix": "<p>", "middle": "<m>", "suffix": "<s>", "pad": PAD, "eod": END}
FIM: dict[str, Any] = {"fim_rate": 1.0, "fim_spm_rate": 0.0, "fim_extra_tokens": EXTRA}
TEXT = list(b"def add(one, two): return one + two")


def config(**fields: Any) -> GPTFIMDatasetConfig:
    return GPTFIMDatasetConfig(seq_length=64, random_seed=1, **{**FIM, **fields})


def permute(ids: list[int], seed: int, **fields: Any) -> list[int]:
    move = permuter(config(**fields), build_tokenizer(TokenizerConfig(**MARKED)))
    found: list[int] = move(np.array(ids), np.random.RandomState(seed)).tolist()
    assert len(found) == len(ids)
    return found


def put_back(ids: list[int], order: float = 0.0) -> list[int]:
    """Return what a permuted document was. order: the `fim_spm_rate`, 0 or 1."""
    suffix, middle = ids.index(S), ids.index(M)
    if order:
        assert ids[:2] == [P, S]
        return ids[middle + 1 :] + ids[2:middle]
    assert ids[0] == P
    return ids[1:suffix] + ids[middle + 1 :] + ids[suffix + 1 : middle]


@pytest.mark.parametrize("order", [0.0, 1.0])
def test_a_document_is_cut_in_three_and_loses_nothing(order: float) -> None:
    """What follows the document makes room for its three tokens."""
    found = [permute([*TEXT, END, *b"rest of a longer one"], seed, fim_spm_rate=order) for seed in range(20)]
    documents = [row[: row.index(END)] for row in found]
    assert all(sorted(each) == sorted([*TEXT, P, M, S]) for each in documents)
    assert [put_back(each, order) for each in documents] == [TEXT] * 20
    assert len({tuple(each) for each in documents}) > 5
    assert permute([*TEXT, END, *b"rest of a longer one"], 3, fim_spm_rate=order) == found[3]


def test_rates_are_probabilities() -> None:
    assert all(permute(TEXT, seed, fim_rate=0) == TEXT for seed in range(20))
    assert 0 < sum(permute(TEXT, seed, fim_rate=0.5) != TEXT for seed in range(20)) < 20
    assert 0 < sum(permute(TEXT, seed, fim_spm_rate=0.5)[1] == S for seed in range(20)) < 20


def test_empty_documents_stay_and_lost_spaces_are_filled_up() -> None:
    """The tokenizer of bytes drops spaces at the end."""
    assert permute([END, END, *b"a", END, END], 0, fim_rate=0) == [END, END, *b"a", END, END]
    assert permute([END, END, *TEXT, END], 0)[:3] == [END, END, P]
    assert sorted(permute([*b"a", *[32] * 9], 0)) == sorted([*b"a", P, M, S, *[PAD] * 6])


def test_fragments_are_cut_one_by_one_but_for_those_with_a_prefix() -> None:
    """The first and the third begin with what keeps them."""
    ids = [*b"#one", F, *b"two and more", F, *b"#three", F, *b"cut off in the end"]
    fields = {"fim_split_sample": "<f>", "fim_fragment_rate": 1.0, "fim_no_prefix": "#"}
    for seed in range(10):
        found = permute(ids, seed, **fields)
        breaks = [place for place, each in enumerate(found) if each == F]
        assert found[: breaks[0]] == list(b"#one")
        assert put_back(found[breaks[0] + 1 : breaks[1]]) == list(b"two and more")
        assert found[breaks[1] + 1 : breaks[2]] == list(b"#three")
    assert permute(ids, 0, **{**fields, "fim_fragment_rate": 0.0}) == ids
    assert permute(ids, 0, **{**fields, "fim_rate": 0.0}) == ids


@every(
    "fields",
    [
        {"mock": True},
        {"fim_rate": None},
        {"fim_spm_rate": 1.5},
        {"fim_split_sample": "<f>"},
        {"fim_extra_tokens": {"prefix": "<p>", "eod": 0}},
        {"drop_last_partial_validation_sequence": False},
    ],
)
def test_what_lacks_something_is_refused(sentence: Sentence, fields: dict[str, Any]) -> None:
    given = config()
    check_fim(given)
    for name, value in fields.items():
        setattr(given, name, value)
    with pytest.raises(ConfigError) as caught:
        check_fim(given)
    sentence(caught)


@every(
    ("tokenizer", "fields"),
    [
        (BYTES, {}),
        (MARKED, {"fim_extra_tokens": {**EXTRA, "pad": 260}}),
        (MARKED, {"fim_split_sample": "\n"}),
        ({"vocab_size": 300}, {}),
    ],
)
def test_a_tokenizer_that_lacks_a_token_is_refused(sentence: Sentence, tokenizer: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        permuter(config(**fields), build_tokenizer(TokenizerConfig(**tokenizer)))
    sentence(caught)


@pytest.mark.process
def test_it_is_trained(train: Train, tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.uint16)
    for number in range(60):
        ids = [*f"{number} ".encode(), *TEXT * 3, END]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(tmp_path / "text.idx"))
    data = {"_target_": "GPTFIMDatasetConfig", "random_seed": 5, "split": "80,20,0", "data_path": "text"}
    resets = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    sections = {
        "model": {"num_layers": 1},
        "train": {"train_iters": 3, "global_batch_size": 4},
        "validation": {"eval_iters": 1, "eval_interval": 3},
        "dataset": {**data, **resets, **FIM, "num_workers": 0},
        "tokenizer": {**MARKED, "tokenizer_type": None},
    }
    done = train(1, sections)
    assert sorted(done.losses) == [1, 2, 3]
    assert done.losses[3] < done.losses[1]
    assert "validation loss at iteration 3" in done.stdout
