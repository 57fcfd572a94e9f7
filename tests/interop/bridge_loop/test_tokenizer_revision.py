"""A revision of a tokenizer, found in a cache of Hugging Face by Megatron-Bridge's code and by ours."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")

TAG, COMMIT = "v1", "ad44e777bcd18fa416d9da3bd8f70d33ebb85d39"
THEIRS = """
from tests.interop.bridge_loop import upstream_on_cpu
upstream_on_cpu.install()
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from megatron.bridge.training.tokenizers.tokenizer import _resolve_hf_tokenizer_revision
config = TokenizerConfig(**given)
print(_resolve_hf_tokenizer_revision(config).tokenizer_model)
"""
OURS = """
from cloudai_mbridge.training.tokenizers.config import TokenizerConfig
from cloudai_mbridge.training.tokenizers.tokenizer import build_tokenizer
tokenizer = build_tokenizer(TokenizerConfig(**given))
print(tokenizer.path, tokenizer.tokenize("the moon"))
"""


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A tokenizer of three words in the cache, as the hub's library leaves it."""
    model = tmp_path / "hub" / "models--org--words"
    place, tags = model / "snapshots" / COMMIT, model / "refs"
    for directory in (place, tags):
        directory.mkdir(parents=True)
    (tags / TAG).write_text(COMMIT)
    words: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "moon": 1, "<unk>": 2}, "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"})
    )
    return place


def _print(program: str, home: Path) -> str:
    given: dict[str, Any] = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "org/words"}
    given["hf_tokenizer_kwargs"] = {"revision": TAG}
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", f"given = {given!r}\n{program}"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.process
def test_both_read_the_snapshot_of_a_revision(snapshot: Path, tmp_path: Path) -> None:
    assert _print(THEIRS, tmp_path) == str(snapshot)
    assert _print(OURS, tmp_path) == f"{snapshot} [0, 1]"
