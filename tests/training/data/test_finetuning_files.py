"""Fine-tuning files: what is wrong with one is said by file, line and remedy."""

import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig, PackedSequenceSpecs
from cloudai_mbridge.training.data.finetuning import (
    FinetuningDataset,
    build_finetuning_datasets,
    check_finetuning,
    collate_for,
    is_packed,
)
from cloudai_mbridge.training.data.iterators import SplitSizes
from cloudai_mbridge.training.data.loader import Share, global_batches, pad, shuffled
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.tokenizers.config import TokenizerConfig
from cloudai_mbridge.training.tokenizers.tokenizer import build_tokenizer
from tests.cases import every
from tests.golden import Sentence

SHIPPED = Path(__file__).parents[2] / "data" / "finetuning"
ALL: SplitSizes = (8, 8, 8)
TRAIN_ONLY: SplitSizes = (8, 0, 0)


def container(root: Path | None = SHIPPED, tp: int = 1, cp: int = 1, **fields: Any) -> Any:
    return SimpleNamespace(
        dataset=FinetuningDatasetConfig(dataset_root=root, **{"seq_length": 64, **fields}),
        model=SimpleNamespace(tensor_model_parallel_size=tp, context_parallel_size=cp, vocab_size=512),
        tokenizer=TokenizerConfig(metadata_path={"library": "byte-level"}),
    )


def build(config: Any, sizes: SplitSizes = ALL) -> tuple[Any, Any, Any]:
    return build_finetuning_datasets(config, build_tokenizer(config), sizes)


def test_the_three_files_are_read() -> None:
    train, valid, test = build(container())
    assert (len(train), len(valid), len(test)) == (40, 12, 9)
    tokens = bytes(train[0]["tokens"].tolist()).decode()
    labels = bytes(train[0]["labels"][train[0]["loss_mask"]].tolist()).decode()
    question, answer = re.fullmatch(r"Reverse: (.*?)((?: \w+)+)", tokens).groups()  # type: ignore[union-attr]
    assert labels.endswith("\0")
    words = tokens.removeprefix("Reverse: ").split()
    assert words[: len(words) // 2] == words[: len(words) // 2 - 1 : -1]
    assert labels == " " + " ".join(words[len(words) // 2 :]) + "\0"
    assert question
    assert answer


def test_what_is_not_used_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "training.jsonl").write_text((SHIPPED / "training.jsonl").read_text())
    train, valid, test = build(container(tmp_path), TRAIN_ONLY)
    assert (len(train), valid, test) == (40, None, None)
    assert build(container(tmp_path, do_validation=False, do_test=False))[1:] == (None, None)
    assert len(build(container(tmp_path, max_train_samples=5), TRAIN_ONLY)[0]) == 5


GOOD = '{"input": "a", "output": "b"}'


@every(
    ("name", "text", "message"),
    [
        ("training.jsonl", None, r"training\.jsonl"),
        ("validation.jsonl", None, r"validation\.jsonl"),
        ("test.jsonl", "", r"test\.jsonl"),
        ("training.jsonl", "\n\n", r"training\.jsonl"),
        ("training.jsonl", f'{GOOD}\n\n{{"input": \n', r"training\.jsonl"),
        ("training.jsonl", f"{GOOD}\n[1]\n", r"training\.jsonl"),
        ("training.jsonl", f'{GOOD}\n{GOOD}\n{{"question": "a"}}', r"training\.jsonl"),
        ("training.jsonl", b"\xff\xfe", r"training\.jsonl"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, sentence: Sentence, name: str, text: Any, message: str
) -> None:
    for each in ("training.jsonl", "validation.jsonl", "test.jsonl"):
        (tmp_path / each).write_text(GOOD + "\n")
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        build(container(tmp_path))
    sentence(caught)


def _packed(size: int) -> PackedSequenceSpecs:
    return PackedSequenceSpecs(packed_sequence_size=size)


@every(
    "make",
    [
        lambda: container(None),
        lambda: container(max_train_samples=0),
        lambda: container(dataset_kwargs={"x": 1}),
        lambda: container(tp=2, cp=2, packed_sequence_specs=_packed(60)),
    ],
)
def test_a_wrong_section_is_refused(sentence: Sentence, make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_finetuning(make())
    sentence(caught)


@every(("tp", "cp", "unit"), [(1, 1, 16), (2, 2, 16), (3, 1, 48), (4, 4, 32)])
def test_a_batch_is_as_long_as_the_longest_sample_of_all_ranks(tp: int, cp: int, unit: int) -> None:
    config = container(tp=tp, cp=cp, seq_length=192)
    train, _, _ = build(config, TRAIN_ONLY)
    collate = collate_for(config, train)
    order, names = shuffled(40, 40, 1), ("tokens", "labels", "loss_mask", "position_ids")
    readers = [global_batches(order, Share(1, rank, 2), 0, lambda _: 4) for rank in range(2)]
    lengths = []
    for requests in islice(zip(*readers, strict=True), 10):
        loaded = [collate([train[i] for i in own], whole) for own, whole in requests]
        _, everyone = requests[0]
        longest = max(train.lengths[everyone])
        lengths.append(-(-longest // unit) * unit)
        for batch in loaded:
            assert {name: value.shape for name, value in batch.items()} == dict.fromkeys(names, (2, lengths[-1]))
        answers = sum(train[i]["loss_mask"].sum() for i in everyone)
        assert sum(float(batch["loss_mask"].sum()) for batch in loaded) == answers
    assert unit > 16 or len(set(lengths)) > 1


def test_a_batch_is_never_longer_than_the_model() -> None:
    row = {"tokens": np.arange(30), "labels": np.arange(30), "loss_mask": np.ones(30, dtype=bool)}
    batch = pad([row], [0], lengths=np.array([30]), limit=31, unit=1, pad_id=7)
    assert batch["tokens"].shape == (1, 31)
    assert (batch["tokens"][0, 30], batch["loss_mask"][0, 30]) == (7, 0)


@pytest.mark.parametrize("fields", [{"dataloader_type": "single"}, {"dataset_kwargs": {"pad_to_max_length": True}}])
def test_every_batch_has_one_length_where_it_must(fields: dict[str, Any]) -> None:
    config = container(**fields)
    train, _, _ = build(config, TRAIN_ONLY)
    assert collate_for(config, train)([train[0]], [0])["tokens"].shape == (1, 64)


def test_long_samples_are_shortened_to_the_model() -> None:
    train, _, _ = build(container(seq_length=16), TRAIN_ONLY)
    assert isinstance(train, FinetuningDataset)
    assert train.lengths.max() == 16


def test_packed_files_are_written_once_and_read_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "training.jsonl").write_text((SHIPPED / "training.jsonl").read_text())
    specs = PackedSequenceSpecs(packed_sequence_size=128, packed_train_data_path=str(tmp_path / "packed.npy"))
    config = container(root, packed_sequence_specs=specs)
    assert is_packed(config.dataset)
    assert not is_packed(container().dataset)
    first = build(config, TRAIN_ONLY)[0]
    assert sum(len(first[i]["cu_seqlens"]) - 1 for i in range(len(first))) >= 40
    (root / "training.jsonl").unlink()
    again = build(config, TRAIN_ONLY)[0]
    assert np.array_equal(first.rows, again.rows)
