"""Whole iterators, built from a configuration on real ranks: what they yield is the same in every layout."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every
from tests.training.conftest import run_ranks

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
SHIPPED = HERE.parents[1] / "data" / "finetuning"
# what does not depend on the layout; sharded data do, by their nature
SAME = (
    "mock",
    "mock_workers",
    "mock_ramp",
    "cyclic",
    "synthetic",
    "blend",
    "blend_per_split",
    "finetuning",
    "packed",
    "fim",
)


def read(processes: int, directory: Path, container: dict[str, Any]) -> dict[str, Any]:
    """Run reading.py; return what rank 0 wrote."""
    shutil.copytree(SHIPPED, directory / "finetuning")
    (directory / "container.json").write_text(json.dumps(container))
    run_ranks(processes, [str(HERE / "reading.py"), str(directory), str(directory / "found.json")], directory)
    found: dict[str, Any] = json.loads((directory / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Return what one rank and what two ranks with micro-batches of two read."""
    from cloudai_mbridge.recipes.container import container_data
    from tests.training.conftest import TINY

    def run(ranks: int) -> dict[str, Any]:
        data = container_data({**TINY, "train": {**TINY["train"], "micro_batch_size": ranks}})
        return read(ranks, tmp_path_factory.mktemp(f"ranks{ranks}"), data)

    return {ranks: run(ranks) for ranks in (1, 2)}


@pytest.fixture(scope="module")
def found(results: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return what one rank read."""
    return results[1]


@every("case", SAME)
def test_two_ranks_read_what_one_reads(results: dict[int, dict[str, Any]], case: str) -> None:
    assert results[1][case] == results[2][case]


@every("case", ["mock", "synthetic", "blend", "finetuning", "fim"])
def test_a_resumed_run_reads_on(found: dict[str, Any], case: str) -> None:
    train, resumed = found[case]["train"], found[case]["resumed"]
    assert train[-len(resumed) :] == resumed
    assert len(train) > len(resumed)


def test_mock_data_in_workers_are_the_same(found: dict[str, Any]) -> None:
    assert found["mock_workers"] == found["mock"]["train"]


def test_evaluation_resumes_where_it_stood_on_other_samples(found: dict[str, Any]) -> None:
    assert found["mock"]["valid_resumed"] == found["mock"]["valid"][8:]
    assert found["mock"]["valid"][:8] != found["mock"]["train"][:8] != found["mock"]["test"]
    assert found["mock"]["phases"] == [True, True, True]


def test_a_ramp_takes_the_same_samples_in_growing_batches(found: dict[str, Any]) -> None:
    ramp = found["mock_ramp"]
    assert ramp["sizes"] == [4, 4, 4, 4]
    assert ramp["batch"] == ramp["single"][:16] == found["mock"]["train"][:16]


def test_shuffled_epochs_hold_every_sample_once(found: dict[str, Any]) -> None:
    whole = [tuple(row) for row in found["cyclic"]["whole"]]
    epochs = [whole[start : start + 20] for start in (0, 20, 40)]
    assert [len(set(epoch)) for epoch in epochs] == [20, 20, 20]
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    assert found["cyclic"]["resumed"] == found["cyclic"]["whole"][28:]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sharded_epochs_hold_every_sample_once(results: dict[int, dict[str, Any]], ranks: int) -> None:
    rows = [tuple(row) for row in results[ranks]["sharded"]]
    assert len(set(rows[:20])) == len(set(rows[20:])) == 20
    assert rows[:20] != rows[20:]


def test_a_blend_draws_from_its_files_by_weight(found: dict[str, Any]) -> None:
    blend = found["blend"]
    assert blend["phases"] == [True, True, True]
    assert blend["none"] == [None, None]  # without evaluation nothing is built for it
    from_second = [min(row) >= 100 for row in blend["train"]]
    assert all(max(row) < 100 or min(row) >= 100 for row in blend["train"])
    assert 24 <= sum(from_second) <= 32  # 0.7 of 40


def test_fill_in_the_middle_is_the_same_in_workers_and_moves_nothing_at_rate_0(found: dict[str, Any]) -> None:
    """The tokenizer of bytes has the ids 258, 257 and 256 for prefix, middle and suffix."""
    fim = found["fim"]
    assert fim["workers"] == [fim["train"], fim["valid"]]
    assert fim["never"] == fim["plain"]
    rows = [*fim["train"], *fim["valid"]]
    for row, plain in zip(rows, [row for part in fim["plain"] for row in part], strict=True):
        assert 258 in row[:2] or row[0] == 0
        assert len(row) == len(plain) == 64
        assert max(plain) < 256 < max(row)


def test_full_validation_reads_everything_once_and_begins_again(found: dict[str, Any]) -> None:
    split = found["blend_per_split"]
    assert split["begins_again"]
    assert split["phases"] == [True, True, False]
    assert split["from_the_cache"] == split["train"]
    assert len({tuple(row) for row in split["valid"]}) == split["passes"] * 8
    assert all(max(row) < 100 for row in split["train"])
    assert all(min(row) >= 100 for row in split["valid"])


def test_fine_tuning_reads_a_shuffled_epoch_per_epoch(found: dict[str, Any]) -> None:
    """40 samples are five global batches of eight."""
    batches = found["finetuning"]["train"]
    assert [len(batch) for batch in batches] == [8] * 7
    epoch = [bytes(row).rstrip(b"\x01") for batch in batches[:5] for row in batch]
    shipped = [json.loads(line) for line in (SHIPPED / "training.jsonl").read_text().splitlines()]
    assert sorted(epoch) == sorted(f"{line['input']} {line['output']}".encode() for line in shipped)
    assert batches[5] != batches[0]
    assert found["finetuning"]["phases"] == [True, True, True]
    assert found["finetuning"]["worker"] == batches[:3]
    assert {len(row) for batch in batches for row in batch} <= {16, 32, 48, 64}


def test_packed_data_come_with_their_boundaries(found: dict[str, Any]) -> None:
    packed = found["packed"]
    for tokens, bounds in zip(packed["tokens"], packed["bounds"], strict=True):
        assert [len(row) for row in tokens] == [64] * 8
        for row, cuts in zip(tokens, bounds, strict=True):
            texts = [bytes(row[a:b]) for a, b in itertools.pairwise(cuts)]
            assert all(text.startswith(b"Reverse: ") or set(text) == {1} for text in texts)


def test_a_provider_is_asked_for_what_the_run_draws(results: dict[int, dict[str, Any]]) -> None:
    for ranks, found in results.items():
        # 10 iterations of 8; evaluations after 4, 8 and at the end, 3 iterations each; one test
        assert found["provider"]["asked"] == [[80, 72, 24], [512, ranks]]
        assert found["provider"]["phases"] == [True, False, False]
        assert found["provider"]["none"] == [None, None]
    numbers = [row[0] for row in results[1]["provider"]["train"]]
    assert numbers == [*range(8), *range(8)]  # the last four of twelve make no whole batch


def test_external_batches_are_handed_through(found: dict[str, Any]) -> None:
    assert found["external"] == {
        "train": ["a", "b", "c"],
        "valid": ["x", "y", "x", "y", "x"],
        "chunks": [["a", "b", "c"], ["a", "b", "c"]],
    }


def test_virtual_stages_have_iterators_of_their_own(found: dict[str, Any]) -> None:
    expected = [row[:4] for row in found["mock"]["train"][:16]]
    assert found["chunks"] == [expected] * 3


ERRORS = {
    "missing file": "onex.bin does not exist; give paths without .bin and .idx",
    "no tokens": "the valid split (99.9,0.1,0) holds 0 tokens, and one sample takes 65; give it more in dataset.split",
    "cache": "document_index.npy is not there, and dataset.fast_cache_load = True builds nothing; build the cache in",
    "deferred": "dataset.fast_cache_load and defer_npy_index_mmap = True builds nothing",
    "several sets": "dataset.multiple_validation_sets = True: Megatron-Bridge 0.6 loads one validation set; use one",
    "weights": "validation.full_validation = True: the validation data have weights; leave the weights out",
    "fim": "dataset.fim_extra_tokens['prefix'] = '<p>' is not a token of the tokenizer; use one of its tokens",
    "external": "dataset.dataloader_type = 'external' needs a DatasetProvider that returns batches",
    "workers": "dataset.num_workers = -1: use 0 (no workers) or more",
    "length": "dataset.seq_length = 32, model.seq_length = 64: use the same",
    "finetuning": "dataset.dataset_root is not set: the directory of training.jsonl",
    "empty": "the train set has no samples",
}


@every("name", ERRORS)
def test_what_cannot_be_read_is_refused(found: dict[str, Any], name: str) -> None:
    assert ERRORS[name] in found["errors"][name]


STAGES = """
import json, sys
from pathlib import Path
import torch.distributed as dist
sys.path.insert(0, {here!r})
import reading
from megatron.core import parallel_state as mpu

def stages(r):
    train, valid, test = r.build(validation={{"eval_iters": 1}}, model={{"pipeline_model_parallel_size": 3}})
    phases = r.phases
    several = r.build(model={{"pipeline_model_parallel_size": 3}}, chunks=2)[0]
    specs = {{"_target_": "PackedSequenceSpecs", "packed_sequence_size": 64}}
    section = {{**reading.FINETUNING, "dataset_root": str(r.directory / "finetuning"), "packed_sequence_specs": specs}}
    packed = r.build(section, tokenizer=reading.BYTES, model={{"pipeline_model_parallel_size": 3}})[0]
    first = next(packed)["tokens"].tolist()
    full = {{**reading.GPT, "blend_per_split": [[[str(r.directory / "one")], None], [[str(r.directory / "two")], None],
             None], "path_to_cache": str(r.directory / "cache3")}}
    r.build(full, validation={{"full_validation": True}}, model={{"pipeline_model_parallel_size": 3}})
    mine = [train is None, valid is None, several == [None, None], phases, r.state.cfg.validation.eval_iters, first]
    everyone = [None] * 3
    dist.all_gather_object(everyone, mine)
    return everyone

reading.CASES = {{"stages": stages}}
reading.main()
"""


def test_middle_stages_read_packed_data_only(
    tmp_path: Path, tiny: Callable[..., dict[str, Any]], ranks: Callable[..., Any]
) -> None:
    container = tiny({"model": {"num_layers": 3, "pipeline_model_parallel_size": 3}})
    shutil.copytree(SHIPPED, tmp_path / "finetuning")
    (tmp_path / "container.json").write_text(json.dumps(container))
    ranks(3, STAGES.format(here=str(HERE)), str(tmp_path), str(tmp_path / "found.json"))
    first, middle, last = json.loads((tmp_path / "found.json").read_text())["stages"]
    assert [each[:3] for each in (first, middle, last)] == [[False] * 3, [True] * 3, [False] * 3]
    assert first[3:] == middle[3:] == last[3:]
    assert first[3] == [True, True, True]
    assert first[4] > 1
