"""Scripts of Megatron-Bridge with their imports renamed, as docs/training.md describes it, and their sizes reduced."""

import re
from collections.abc import Iterable
from pathlib import Path

FUNCTIONAL_TESTS = "tests/functional_tests"
_PACKAGE = re.compile(r"\bmegatron\.bridge\b")

# (what a file contains, what stands in its place)
Change = tuple[str, str]
_SIZES: tuple[Change, ...] = (
    *((f"{name}={old}", f"{name}={new}") for name, old, new in (
        ("hidden_size", 2048, 64), ("ffn_hidden_size", 8192, 128), ("num_attention_heads", 32, 8),
        ("seq_length", 512, 32), ("seq_length", 256, 32), ("num_layers", 16, 4), ("vocab_size", 10000, 500),
        ("vocab_size", 9999, 499), ("mup_base_hidden_size", 1024, 32), ("num_workers", 1, 0),
    )),
    *((f"{name}: int = {old}", f"{name}: int = {new}") for name, old, new in (
        ("hidden_size", 768, 64), ("ffn_hidden_size", 2688, 128), ("num_attention_heads", 16, 8),
        ("hidden_size", 2048, 64), ("ffn_hidden_size", 8192, 128), ("num_attention_heads", 32, 8),
        ("num_layers", 16, 2), ("kv_channels", 64, 8),
    )),
    ("seq_length = 512", "seq_length = 32"),
    ("vocab_size: int | None = 128256", "vocab_size: int | None = 512"),
)  # fmt: skip
# Upstream marks its test of muP as broken: a provider of it is no dataclass, and so has no sizes
_REPAIRS: tuple[Change, ...] = (
    ("class Llama32TestModelProvider", '@__import__("dataclasses").dataclass\nclass Llama32TestModelProvider'),
)
# A machine without a GPU and without network
_MACHINE: tuple[Change, ...] = (
    ('"backend": "nccl"', '"backend": "gloo"'),
    ("barrier(device_ids=[local_rank])", "barrier()"),
    (
        'tokenizer_type="HuggingFaceTokenizer",\n            tokenizer_model="gpt2"',
        'metadata_path={"library": "byte-level"},\n            vocab_size=257',
    ),
)


def rename(text: str) -> str:
    """Return a script with the package's name replaced, and nothing else."""
    return _PACKAGE.sub("cloudai_mbridge", text)


def reduced(text: str, changes: Iterable[Change] = (*_SIZES, *_MACHINE, *_REPAIRS)) -> str:
    """Return a renamed script that a CPU runs in seconds."""
    for old, new in changes:
        text = re.sub(rf"(?<!\w){re.escape(old)}(?!\d)", lambda _, new=new: new, text)  # type: ignore[misc]
    return text


def write_functional_tests(source: Path, directory: Path) -> Path:
    """Write upstream's tests of training below `directory`, renamed and reduced; return their folder."""
    utils = source / FUNCTIONAL_TESTS / "utils.py"
    found = source / FUNCTIONAL_TESTS / "test_groups/training"
    to = directory / FUNCTIONAL_TESTS
    to.mkdir(parents=True)
    (to / "utils.py").write_text(reduced(rename(utils.read_text())))
    for file in sorted(found.glob("test_*.py")):
        (to / file.name).write_text(reduced(rename(file.read_text())))
    return to
