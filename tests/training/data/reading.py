"""What the tests of whole iterators run on every rank: build them from a configuration, read, put the ranks together.

Run as a script by test_iterators.py: reading.py DIRECTORY RESULTS.json
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.dataset import DatasetBuildContext, DatasetProvider
from cloudai_mbridge.training.config.rules.validate import runtime_config_update
from cloudai_mbridge.training.data import build_data_iterators
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.initialize import destroy, initialize
from cloudai_mbridge.training.startup.prepare import adapt_to_device

FINETUNING = {"_target_": "FinetuningDatasetConfig", "seq_length": 64, "num_workers": 0}
GPT = {
    "_target_": "GPTDatasetConfig",
    "random_seed": 5,
    "sequence_length": 64,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "num_workers": 0,
}
BYTES = {"metadata_path": {"library": "byte-level"}, "vocab_size": 256}
MARKED = {**BYTES, "special_tokens": ["<p>", "<m>", "<s>"]}
FIM = {
    "_target_": "GPTFIMDatasetConfig",
    "fim_rate": 1.0,
    "fim_spm_rate": 0.5,
    "fim_extra_tokens": {"prefix": "<p>", "middle": "<m>", "suffix": "<s>", "pad": 1, "eod": 0},
}


def main() -> None:
    """Run every case; rank 0 writes what was read."""
    directory, results = Path(sys.argv[1]), Path(sys.argv[2])
    base = json.loads((directory / "container.json").read_text())
    cpu.install()
    first = ConfigContainer.from_dict(base)
    adapt_to_device(first)
    runtime_config_update(first)
    initialize(first)
    if dist.get_rank() == 0:
        write_corpora(directory)
    dist.barrier()
    with cpu.megatron_device():
        found = {name: case(Reader(base, directory)) for name, case in CASES.items() if _is_wanted(name)}
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found))
    destroy()


def _is_wanted(name: str) -> bool:
    return len(sys.argv) < 4 or name in sys.argv[3].split(",")


def write_corpora(directory: Path) -> None:
    """Write corpora of documents of random lengths: ids below 100, from 100, and of letters with an end."""
    for name, low, documents in (("one", 0, 60), ("two", 100, 90), ("text", 97, 60)):
        random = np.random.default_rng(low)
        builder = IndexedDatasetBuilder(str(directory / f"{name}.bin"), dtype=np.uint16)
        for _ in range(documents):
            length = int(random.integers(20, 400))
            ids = random.integers(low, low + (26 if name == "text" else 100), length)
            ids[-1] = 0 if name == "text" else ids[-1]
            builder.add_document(torch.from_numpy(ids), [length])
        builder.finalize(str(directory / f"{name}.idx"))


class Reader:
    """Builds iterators and reads global batches from them, the same on every layout."""

    def __init__(self, base: dict[str, Any], directory: Path) -> None:
        self.base, self.directory = base, directory
        self.state: Any = None

    def build(
        self,
        dataset: Any = None,
        *,
        train: dict[str, Any] | None = None,
        validation: dict[str, Any] | None = None,
        tokenizer: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        consumed: int = 0,
        consumed_valid: int = 0,
        chunks: int = 1,
    ) -> tuple[Any, Any, Any]:
        """Build the three iterators; a dataset that is not a dict replaces the section after it is read."""
        data = json.loads(json.dumps(self.base))
        sections = {"train": train, "validation": validation, "model": model}
        for name, changes in sections.items():
            data[name].update(changes or {})
        if isinstance(dataset, dict):
            data["dataset"] = dataset
        data["tokenizer"] = tokenizer or data["tokenizer"]
        config = ConfigContainer.from_dict(data)
        if dataset is not None and not isinstance(dataset, dict):
            config.dataset = dataset
        adapt_to_device(config)
        runtime_config_update(config)
        progress = SimpleNamespace(consumed_train_samples=consumed, consumed_valid_samples=consumed_valid)
        self.state = SimpleNamespace(cfg=config, tokenizer=None, train_state=progress)
        return build_data_iterators(self.state, chunks)

    @property
    def phases(self) -> list[bool]:
        """do_train, do_valid, do_test."""
        progress = self.state.train_state
        return [progress.do_train, progress.do_valid, progress.do_test]

    def read(self, iterator: Any, samples: int, key: str = "tokens") -> list[list[float]]:
        """Return that many samples in global order."""
        size, replicas = self.state.cfg.train.micro_batch_size, mpu.get_data_parallel_world_size()
        rows: list[Any] = []
        for _ in range(samples // (size * replicas)):
            rows += self.gather([row.tolist() for row in next(iterator)[key]])
        return rows

    def read_batches(self, iterator: Any, batches: int, key: str = "tokens") -> list[list[list[float]]]:
        """Return whole global batches, micro-batch by micro-batch; what one rank reads is one tensor."""
        size = self.state.cfg.train.micro_batch_size
        found = []
        for _ in range(batches):
            mine = next(iterator)[key]
            assert len(mine) % size == 0
            found.append([row for each in mine.split(size) for row in self.gather(each.tolist())])
        return found

    @staticmethod
    def gather(mine: list[Any]) -> list[Any]:
        """Put the rows of all data-parallel ranks one below the other."""
        everyone: list[Any] = [None] * mpu.get_data_parallel_world_size()
        dist.all_gather_object(everyone, mine, group=mpu.get_data_parallel_group())
        return [row for rows in everyone for row in rows]

    def error(self, *args: Any, **kwargs: Any) -> str:
        """Return what building is refused with."""
        try:
            self.build(*args, **kwargs)
        except ConfigError as error:
            return str(error)
        raise AssertionError("nothing was refused")


def mock(r: Reader) -> Any:
    train, valid, test = r.build(validation={"eval_iters": 2, "eval_interval": 5})
    found = {"train": r.read(train, 24), "valid": r.read(valid, 16), "test": r.read(test, 8), "phases": r.phases}
    resumed, valid, _ = r.build(validation={"eval_iters": 2, "eval_interval": 5}, consumed=16, consumed_valid=8)
    return {**found, "resumed": r.read(resumed, 8), "valid_resumed": r.read(valid, 8)}


def mock_workers(r: Reader) -> Any:
    section = {**r.base["dataset"], "num_workers": 1}
    train, _, _ = r.build(section)
    return r.read(train, 24)


def mock_ramp(r: Reader) -> Any:
    ramp = {"rampup_batch_size": [4, 4, 16], "global_batch_size": 8}
    by_micro_batch = r.read(r.build(train=ramp)[0], 24)
    batches = r.read_batches(r.build({**r.base["dataset"], "dataloader_type": "batch"}, train=ramp)[0], 4)
    return {
        "single": by_micro_batch,
        "sizes": [len(b) for b in batches],
        "batch": [row for batch in batches for row in batch],
    }


def cyclic(r: Reader) -> Any:
    section = {**SYNTHETIC, "pool_samples": 20, "dataloader_type": "cyclic", "data_sharding": False, "drop_last": False}
    train = {"train_iters": 5, "global_batch_size": 4}
    whole = r.read(r.build(section, train=train)[0], 60, "labels")
    return {"whole": whole, "resumed": r.read(r.build(section, train=train, consumed=28)[0], 32, "labels")}


def sharded(r: Reader) -> Any:
    section = {**SYNTHETIC, "pool_samples": 20, "dataloader_type": "cyclic"}
    train = {"train_iters": 5, "global_batch_size": 4}
    return r.read(r.build(section, train=train)[0], 40, "labels")


SYNTHETIC = {"_target_": "SyntheticGPTDatasetConfig", "seq_length": 64, "num_workers": 0}


def synthetic(r: Reader) -> Any:
    train, valid, test = r.build(SYNTHETIC, validation={"eval_iters": 1})
    found = {"train": r.read(train, 24), "valid": r.read(valid, 8), "test": r.read(test, 8), "phases": r.phases}
    return {**found, "resumed": r.read(r.build(SYNTHETIC, consumed=8)[0], 16)}


def blend(r: Reader) -> Any:
    paths = [str(r.directory / name) for name in ("one", "two")]
    section = {
        **GPT,
        "blend": [paths, [0.3, 0.7]],
        "split": "80,10,10",
        "path_to_cache": str(r.directory / f"cache{dist.get_world_size()}"),
    }
    train, valid, test = r.build(section, validation={"eval_iters": 1})
    found = {"train": r.read(train, 40), "valid": r.read(valid, 8), "test": r.read(test, 8), "phases": r.phases}
    train, valid, test = r.build(section, consumed=16)
    return {**found, "resumed": r.read(train, 24), "none": [valid, test]}


def fim(r: Reader) -> Any:
    section = {
        **GPT,
        "blend": [[str(r.directory / "text")], None],
        "split": "80,10,10",
        "path_to_cache": str(r.directory / f"fim{dist.get_world_size()}"),
    }
    moved = {**section, **FIM}

    def read(dataset: Any, samples: int, **progress: int) -> Any:
        train, valid, _ = r.build(dataset, tokenizer=MARKED, validation={"eval_iters": 1}, **progress)
        return r.read(train, samples), r.read(valid, 8)

    train, valid = read(moved, 24)
    return {
        "train": train,
        "valid": valid,
        "resumed": read(moved, 16, consumed=8)[0],
        "workers": read({**moved, "num_workers": 2}, 24),
        "never": read({**moved, "fim_rate": 0.0}, 24),
        "plain": read(section, 24),
    }


def blend_per_split(r: Reader) -> Any:
    one, two = (str(r.directory / name) for name in ("one", "two"))
    section = {**GPT, "blend_per_split": [[[one], None], [[two], None], None]}
    section["path_to_cache"] = str(r.directory / f"cache{dist.get_world_size()}")
    train, valid, test = r.build(section, validation={"eval_iters": 0, "full_validation": True})
    passes = r.state.cfg.validation.eval_iters
    samples = passes * 8
    first, second = (r.read(valid, samples) for _ in range(2))
    phases = r.phases
    cached = {**section, "fast_cache_load": True, "defer_npy_index_mmap": True}
    fast = r.build(cached, validation={"eval_iters": 0, "full_validation": True})[0]
    return {
        "train": r.read(train, 8),
        "from_the_cache": r.read(fast, 8),
        "passes": passes,
        "valid": first,
        "begins_again": first == second,
        "phases": phases,
        "test": test,
    }


def finetuning(r: Reader) -> Any:
    section = {**FINETUNING, "dataset_root": str(r.directory / "finetuning")}
    train, valid, test = r.build(section, validation={"eval_iters": 1}, tokenizer=BYTES)
    found = {
        "train": r.read_batches(train, 7),
        "valid": r.read_batches(valid, 1),
        "test": r.read_batches(test, 1),
        "phases": r.phases,
    }
    resumed = r.build(section, tokenizer=BYTES, consumed=24)[0]
    worker = r.build({**section, "num_workers": 1}, tokenizer=BYTES)[0]
    return {**found, "resumed": r.read_batches(resumed, 4), "worker": r.read_batches(worker, 3)}


def packed(r: Reader) -> Any:
    path = str(r.directory / f"packed{dist.get_world_size()}.npy")
    specs = {"_target_": "PackedSequenceSpecs", "packed_sequence_size": 64, "packed_train_data_path": path}
    section = {**FINETUNING, "dataset_root": str(r.directory / "finetuning"), "packed_sequence_specs": specs}
    one = {"micro_batch_size": 1}
    found = r.read_batches(r.build(section, train=one, tokenizer=BYTES)[0], 2)
    bounds = r.read_batches(r.build(section, train=one, tokenizer=BYTES)[0], 2, "cu_seqlens")
    return {"tokens": found, "bounds": [[[v for v in row if v >= 0] for row in batch] for batch in bounds]}


class Given(DatasetProvider):
    """Datasets that a user made."""

    make: Callable[[DatasetBuildContext], Any]

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, Any, Any]:
        """Return them."""
        made: tuple[Any, Any, Any] = self.make(context)
        return made


def _given(make: Callable[[DatasetBuildContext], Any], **fields: Any) -> Given:
    provider = Given(num_workers=0, **fields)
    provider.make = make
    return provider


def provider(r: Reader) -> Any:
    asked: list[Any] = []

    def make(context: DatasetBuildContext) -> Any:
        asked.append([context.train_samples, context.valid_samples, context.test_samples])
        asked.append([context.tokenizer.vocab_size, context.pg_collection.dp.size()])
        return [{"tokens": torch.tensor([i])} for i in range(12)], None, None

    train, valid, test = r.build(_given(make), validation={"eval_iters": 3, "eval_interval": 4})
    return {"asked": asked, "train": r.read(train, 16), "none": [valid, test], "phases": r.phases}


def external(r: Reader) -> Any:
    def make(context: DatasetBuildContext) -> Any:
        return iter(["a", "b", "c"]), ["x", "y"], None

    train, valid, _ = r.build(_given(make, dataloader_type="external"), validation={"eval_iters": 1})
    several, _, _ = r.build(_given(make, dataloader_type="external"), chunks=2)
    return {
        "train": [next(train) for _ in range(3)],
        "valid": [next(valid) for _ in range(5)],
        "chunks": [[next(each) for _ in range(3)] for each in several],
    }


def chunks(r: Reader) -> Any:
    several = r.build(chunks=3)[0]
    return [[row[:4] for row in r.read(each, 16)] for each in several]


def errors(r: Reader) -> Any:
    one = str(r.directory / "one")
    blend = {**GPT, "blend": [[one], None], "split": "100,0,0"}
    split = [[[one], None], None, None]
    cached = {"fast_cache_load": True, "path_to_cache": str(r.directory / "empty")}
    missing = {}
    if dist.get_world_size() == 1:  # several ranks fail at different barriers of Megatron-Core's builder
        missing["cache"] = r.error({**GPT, "blend_per_split": split, **cached})
        missing["deferred"] = r.error({**r.base["dataset"], **cached, "defer_npy_index_mmap": True})
    return {
        "missing file": r.error({**blend, "blend": [[one + "x"], None]}),
        "no tokens": r.error({**blend, "split": "99.9,0.1,0"}, validation={"eval_iters": 1}),
        "several sets": r.error({**blend, "multiple_validation_sets": True}),
        "weights": r.error({**blend, "blend": [[one], [1.0]]}, validation={"full_validation": True}),
        "fim": r.error({**blend, **FIM}, tokenizer=BYTES),
        "external": r.error({**r.base["dataset"], "dataloader_type": "external"}),
        "workers": r.error({**r.base["dataset"], "num_workers": -1}),
        "length": r.error({**SYNTHETIC, "seq_length": 32}),
        "finetuning": r.error(FINETUNING, tokenizer=BYTES),
        "empty": r.error(_given(lambda context: ([], None, None))),
        **missing,
    }


CASES: dict[str, Callable[[Reader], Any]] = {
    each.__name__: each
    for each in (
        *(mock, mock_workers, mock_ramp, cyclic, sharded, synthetic, blend, blend_per_split, finetuning, packed),
        *(fim, provider, external, chunks, errors),
    )
}


if __name__ == "__main__":
    main()
