"""What is refused before anything starts, and files that changed after they were saved."""

from types import SimpleNamespace

import pytest

from tests.golden import Sentence

pytest.importorskip("megatron.core")

from cloudai_mbridge.training.checkpointing import (
    check_checkpoint_packages,
    checkpoint_exists,
    get_checkpoint_name,
    hf_export,
    init_checkpointing_context,
    manager,
)
from cloudai_mbridge.training.compat.checkpoints import HAS_HASHES
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.peft.config import DoRA
from tests.cases import every


def check(**fields):
    check_checkpoint_packages(SimpleNamespace(checkpoint=CheckpointConfig(**fields)))


@every(
    "fields",
    [
        {},
        {"save": "a", "async_save": True},
        {"save": "a", "async_save": True, "async_strategy": "mcore"},
        {"most_recent_k": 1},
        {"most_recent_k": -1},
        {"most_recent_k": None},
        {"non_persistent_ckpt_type": "global", "non_persistent_save_interval": 2},
    ],
)
def test_accepted(fields):
    check(**fields)


@every(
    "fields",
    [
        {"ckpt_format": "torch"},
        {"ckpt_format": "torch_dcp"},
        {"ckpt_format": "fsdp_dtensor", "save": "c", "async_save": True},
        {"non_persistent_ckpt_type": "local"},
        {"non_persistent_ckpt_type": "in_memory"},
        {"non_persistent_save_interval": 2},
        {"save": "a/b", "non_persistent_ckpt_type": "global", "non_persistent_global_ckpt_dir": "a/../a/b/"},
        {"most_recent_k": 0},
        {"most_recent_k": -2},
        {"replication": True},
    ],
)
def test_refused(sentence: Sentence, fields):
    with pytest.raises(ConfigError) as caught:
        check(**fields)
    sentence(caught)
    assert len(str(caught.value).splitlines()) == 1


@every(
    ("fields", "peft", "part"),
    [
        ({"ckpt_format": "fsdp_dtensor"}, None, "needs ckpt_format = 'torch_dist'"),
        ({"non_persistent_ckpt_type": "local"}, None, "needs non_persistent_ckpt_type = 'global'"),
        ({}, DoRA(), "exports no magnitudes of DoRA"),
        ({"hf_source_path": None}, None, "needs hf_source_path, model.hf_model_id or tokenizer.tokenizer_model"),
        ({}, None, "needs the Python package megatron-bridge, which is not installed: run `pip install"),
    ],
)
def test_an_export_to_hugging_face_is_refused(monkeypatch, fields, peft, part):
    monkeypatch.setattr(hf_export, "is_installed", lambda module: module == "megatron.bridge" and bool(fields or peft))
    checkpoint = CheckpointConfig(**{"also_save_hf_checkpoint": True, "hf_source_path": "a", **fields})
    cfg = SimpleNamespace(
        checkpoint=checkpoint, peft=peft, model=SimpleNamespace(), tokenizer=SimpleNamespace(tokenizer_model=None)
    )
    with pytest.raises(ConfigError) as caught:
        check_checkpoint_packages(cfg)
    assert "checkpoint.also_save_hf_checkpoint = True" in str(caught.value)
    assert part in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


LOCAL = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": "a"}


@every(
    ("fields", "part"),
    [
        ({}, None),
        ({"replication": True, "replication_jump": 2}, None),
        ({"non_persistent_local_ckpt_dir": None}, "needs non_persistent_local_ckpt_dir: a directory on every machine"),
        ({"ckpt_format": "fsdp_dtensor"}, "'local' needs ckpt_format = 'torch_dist'; use 'global'"),
        ({"replication": True}, "needs replication_jump and replication_factor of at least 1, got None and 2"),
    ],
)
def test_local_ones_with_the_package(fields, part, monkeypatch):
    monkeypatch.setattr(manager, "is_installed", lambda module: True)
    if part is None:
        check(**LOCAL | fields)
    else:
        with pytest.raises(ConfigError, match=part):
            check(**LOCAL | fields)


def test_the_context_is_refused_too():
    assert init_checkpointing_context(CheckpointConfig()) == {}
    with pytest.raises(ConfigError, match="nvidia-resiliency-ext"):
        init_checkpointing_context(CheckpointConfig(non_persistent_ckpt_type="local"))


def test_names_and_what_exists(tmp_path):
    assert get_checkpoint_name("a/b", 5) == "a/b/iter_0000005"
    assert get_checkpoint_name("a/b", 12345678) == "a/b/iter_12345678"
    assert not checkpoint_exists(None)
    assert not checkpoint_exists(str(tmp_path / "nowhere"))
    begun = tmp_path / "iter_0000005"
    begun.mkdir()
    for name in (".metadata", "metadata.json", "common.pt"):
        (begun / name).touch()
    assert not checkpoint_exists(str(tmp_path))  # its last file is missing
    (begun / "train_state.pt").touch()
    assert checkpoint_exists(str(tmp_path))


CHANGED = """
from pathlib import Path

def scenario():
    names = {"save": "hashed", "load": "hashed"}
    hashed = {**names, "verify_integrity": True, "ckpt_load_validate_sharding_integrity": False}
    run = start(checkpoint=hashed)
    run.train(1)
    run.save()
    whole = start(checkpoint=hashed).load()[0]
    data = max(Path("hashed/iter_0000001").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    return [whole, data.name, refusal(start(checkpoint=hashed))]
"""


def test_a_changed_file_is_refused(launch):
    if not HAS_HASHES:
        with pytest.raises(ValueError, match=r"verify_integrity = True needs Megatron-Core 0\.19 or newer; use False"):
            check(verify_integrity=True)
        return
    ((whole, name, refused),), _ = launch(1, CHANGED)
    assert whole == 1
    assert f"hashed/iter_0000001/{name}: has other bytes than were written" in refused
