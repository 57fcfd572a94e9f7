"""Packing loses no sample, mixes none with another, and is the same every time."""

import itertools
import json
import pickle
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudai_mbridge.training.data.loader import stack_packed
from cloudai_mbridge.training.data.samples import PackedDataset, Sample, first_fit, load_or_pack, pack, sequence_unit
from cloudai_mbridge.training.errors import ConfigError
from tests.cases import every
from tests.golden import Sentence


def sample(*ids: int, prompt: int = 1) -> Sample:
    return Sample(np.array(ids), np.arange(len(ids)) >= prompt)


def samples_of(lengths: list[int]) -> list[Sample]:
    """Return samples of that many tokens each; no id is in two of them."""
    return [sample(*range(100 * i + 10, 100 * i + 11 + length)) for i, length in enumerate(lengths)]


def unpacked(rows: np.ndarray) -> Counter[tuple[int, ...]]:
    """Return the learned labels of every sequence that has any."""
    found: Counter[tuple[int, ...]] = Counter()
    for item in (PackedDataset(rows)[i] for i in range(len(rows))):
        bounds = item["cu_seqlens"].tolist()
        for start, stop in itertools.pairwise(bounds):
            assert item["position_ids"][start:stop].tolist() == list(range(stop - start))
            learned = item["loss_mask"][start:stop].bool()
            if learned.any():
                found[tuple(item["labels"][start:stop][learned].tolist())] += 1
    return found


def test_first_fit_by_hand() -> None:
    assert first_fit([5, 4, 3, 6, 2, 1, 1], 8) == [[0, 2], [1, 4, 5, 6], [3]]


@given(st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_first_fit_holds_everything_once_and_never_too_much(lengths: list[int]) -> None:
    bins = first_fit(lengths, 16)
    assert sorted(i for items in bins for i in items) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in items) <= 16 for items in bins)
    assert sum(sum(lengths[i] for i in items) <= 8 for items in bins) <= 1  # two half-empty ones would be one


@given(st.lists(st.integers(1, 16), min_size=1, max_size=20), st.sampled_from([1, 2, 4]), st.integers(0, 5))
def test_every_sample_is_in_one_packed_sequence(lengths: list[int], unit: int, seed: int) -> None:
    samples = samples_of(lengths)
    rows = pack(samples, 16, unit=unit, seed=seed)
    assert unpacked(rows) == Counter(tuple(s.ids[1:].tolist()) for s in samples)
    for item in (PackedDataset(rows)[i] for i in range(len(rows))):
        assert item["cu_seqlens"][0] == 0
        assert item["cu_seqlens"][-1] == 16
        assert all(length % unit == 0 for length in np.diff(item["cu_seqlens"]))


def test_the_seed_decides_the_order() -> None:
    samples = samples_of([3, 5, 7, 2, 9, 4])
    first, again, other = (pack(samples, 16, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_padding_has_no_loss_and_prompts_neither() -> None:
    rows = pack([sample(1, 2, 3, 4, 5, prompt=3)], 8, unit=4, pad_id=9)
    assert rows.tolist() == [
        [[1, 2, 3, 4, 9, 9, 9, 9], [2, 3, 4, 5, 9, 9, 9, 9], [0, 0, 1, 1, 0, 0, 0, 0], [0, 1, 2, 3, 0, 1, 2, 3]]
    ]


def test_the_file_gives_back_what_was_packed(tmp_path: Path) -> None:
    path, metadata = tmp_path / "new" / "train.npy", tmp_path / "new" / "facts.json"
    made = load_or_pack(str(path), str(metadata), 16, lambda: pack(samples_of([3, 5, 7, 2]), 16))
    read = load_or_pack(str(path), str(metadata), 16, lambda: pytest.fail("packed again"))
    assert np.array_equal(made.rows, read.rows)
    assert json.loads(metadata.read_text()) == {
        "packed_sequence_size": 16,
        "num_packed_sequences": len(made),
        "max_samples_per_bin": made.max_boundaries - 1,
        "dataset_max_seqlen": made.longest,
        "packing_factor": pytest.approx(sum(len(made[i]["cu_seqlens"]) - 1 for i in range(len(made))) / len(made)),
    }
    assert sorted(p.name for p in path.parent.iterdir()) == ["facts.json", "train.npy"]


@every("wrong", ["text", "pickle", "float", "flat", "size"])
def test_a_foreign_file_is_refused_by_its_name(tmp_path: Path, sentence: Sentence, wrong: str) -> None:
    path = tmp_path / "train.npy"
    if wrong == "text":
        path.write_text("no array")
    elif wrong == "pickle":
        np.save(path, np.array([{"input_ids": [1]}], dtype=object), allow_pickle=True)
    elif wrong == "size":
        np.save(path, np.zeros((2, 4, 32), dtype=np.int32))
    else:
        np.save(path, np.zeros((2, 4, 16) if wrong == "float" else (4, 16), dtype=np.float32))
    with pytest.raises(ConfigError, match=r"train\.npy") as caught:
        load_or_pack(str(path), None, 16, lambda: pytest.fail("packed"))
    sentence(caught, numpy=r"\((?:This file|Array can't).*\)(?=;)")


def test_no_code_from_a_packed_file_is_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path(tmp_path / "was_here").touch, ())

    path = tmp_path / "train.npy"
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ConfigError):
        load_or_pack(str(path), None, 16, lambda: pytest.fail("packed"))
    assert not (tmp_path / "was_here").exists()


@every(("given_unit", "cp", "unit"), [(None, 1, 1), (1, 2, 4), (8, 2, 8), (3, 2, 12), (16, 4, 16)])
def test_context_parallelism_needs_even_chunks_of_every_sample(given_unit: int | None, cp: int, unit: int) -> None:
    assert sequence_unit(given_unit, cp) == unit


def test_a_sample_that_does_not_fit_once_padded_is_refused(sentence: Sentence) -> None:
    with pytest.raises(ConfigError, match="packed_sequence_size") as caught:
        pack(samples_of([9]), 10, unit=4)
    sentence(caught)


def test_boundaries_of_a_batch_end_with_minus_one() -> None:
    dataset = PackedDataset(pack(samples_of([4, 4, 4, 12, 2]), 16, seed=0))
    rows = [dataset[i] for i in range(len(dataset))]
    batch = stack_packed(rows, [])
    assert batch["tokens"].shape == (len(rows), 16)
    assert batch["cu_seqlens"].dtype == torch.int32
    for i, row in enumerate(rows):
        end = int(batch["cu_seqlens_argmin"][i])
        assert batch["cu_seqlens"][i, end] == -1
        assert batch["cu_seqlens"][i, :end].tolist() == row["cu_seqlens"].tolist()
        assert int(batch["max_seqlen"][i]) == np.diff(row["cu_seqlens"]).max()


def test_boundaries_have_one_length_where_cuda_graphs_need_it() -> None:
    dataset = PackedDataset(pack(samples_of([4, 4, 4, 12, 2]), 16, seed=0))
    collate = partial(stack_packed, boundaries=dataset.max_boundaries, longest=dataset.longest)
    shapes = {collate([dataset[i]], [])["cu_seqlens"].shape for i in range(len(dataset))}
    assert shapes == {(1, dataset.max_boundaries + 1)}
    for i in range(len(dataset)):
        batch = collate([dataset[i]], [])
        assert batch["cu_seqlens"][0, : int(batch["cu_seqlens_argmin"])].max() == 16
        assert int(batch["max_seqlen"]) == dataset.longest
