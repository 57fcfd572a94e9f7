"""Which checkpoint a run begins from, by what is on the disk."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from cloudai_mbridge.training.checkpointing.find import Found, find_checkpoint
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig


def saved(root: Path, iteration: int, *, complete: bool = True) -> str:
    directory = root / f"iter_{iteration:07d}"
    directory.mkdir(parents=True)
    for name in (".metadata", "metadata.json", "common.pt", *(["train_state.pt"] if complete else [])):
        (directory / name).touch()
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return str(directory)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_broken_second_stream_does_not_cost_the_first(tmp_path: Path, is_complete: bool) -> None:
    first = saved(tmp_path, 5)
    second = saved(tmp_path / "non_persistent", 8, complete=is_complete)
    found = find_checkpoint(CheckpointConfig(load=str(tmp_path), non_persistent_ckpt_type="global"))
    assert isinstance(found, Found)
    assert (found.directory, found.is_persistent) == ((second, False) if is_complete else (first, True))
    assert bool(found.notes) != is_complete
