"""Which checkpoint a run begins from, by what is on the disk."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from cloudai_mbridge.training.checkpointing.layout import find_checkpoint, move_aside, restore
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
    assert (found.directory, found.is_persistent) == ((second, False) if is_complete else (first, True))
    assert bool(found.notes) != is_complete


@pytest.mark.parametrize("comes_to_its_end", [True, False])
def test_a_checkpoint_that_is_saved_again_is_never_missing(tmp_path: Path, comes_to_its_end: bool) -> None:
    directory = Path(saved(tmp_path, 5))
    (directory / "of").write_text("first")
    move_aside(directory)
    assert not list(directory.iterdir())
    (directory / "of").write_text("second")  # and then it is killed, or goes on
    if comes_to_its_end:
        for name in (".metadata", "metadata.json", "common.pt", "train_state.pt"):
            (directory / name).touch()
    found = find_checkpoint(CheckpointConfig(load=str(tmp_path)))
    assert Path(found.directory, "of").read_text() == ("second" if comes_to_its_end else "first")
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000005"]


def test_killed_while_a_checkpoint_is_set_aside(tmp_path: Path) -> None:
    directory = Path(saved(tmp_path, 5))
    directory.rename(directory.with_name("iter_0000005.replaced"))  # between the two steps
    restore(tmp_path)
    assert (directory / "train_state.pt").exists()
    move_aside(directory)
    move_aside(directory)  # twice killed
    restore(tmp_path)
    assert (directory / "train_state.pt").exists()
