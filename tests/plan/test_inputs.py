"""Weights and data that are not there are found before anything is written, where this machine can tell."""

from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge import pipeline
from cloudai_mbridge.errors import BadInput
from tests.golden import Sentence

LOCAL = 'name = "l"\nscheduler = "local"\n'
SLURM = 'name = "s"\nscheduler = "slurm"\ndefault_partition = "main"\n[[partitions]]\nname = "main"\n'
SAVES = 'save_dir = "/none/base"\n'


def plan(tmp_path: Path, args: str, system: str = LOCAL, extra: str = "", base: str = "") -> tuple[str, ...]:
    """Return the notes of a test with these arguments, and of one before it."""
    tests = tmp_path / "tests"
    tests.mkdir(exist_ok=True)
    for name, own in (("base", base), ("tune", args)):
        head = f'name = "{name}"\ndescription = ""\ntest_template_name = "MegatronBridge"\n[cmd_args]\n'
        head += 'launcher = "embedded"\nmodel_family_name = "tiny"\nmodel_recipe_name = "gpt_tiny"\n'
        more = f"[extra_cmd_args]\n{extra}\n" if name == "tune" else ""
        (tests / f"{name}.toml").write_text(f'{head}compute_dtype = "fp32"\nnum_gpus = 1\n{own}\n{more}')
    (tmp_path / "system.toml").write_text(system)
    entries = [
        f'[[Tests]]\nid = "{name}"\ntest_name = "{name}"\ntime_limit = "00:10:00"\n' for name in ("base", "tune")
    ]
    (tmp_path / "scenario.toml").write_text('name = "s"\n' + "".join(entries))
    request = pipeline.Request(tmp_path / "system.toml", tmp_path / "scenario.toml", tests, tmp_path / "out")
    return pipeline.plan(request).plan.notes


SQUAD = 'data = "squad"\ndataset_root = "{}"\n'


@pytest.mark.parametrize(
    ("args", "extra", "name"),
    [
        ('pretrained_checkpoint = "/none/w"', "", "cmd_args.pretrained_checkpoint = '/none/w'"),
        ('task = "lora"', '"checkpoint.pretrained_checkpoint" = "/none"', "checkpoint.pretrained_checkpoint = '/none'"),
        (SQUAD.format("/none"), "", "cmd_args.dataset_root = '/none'"),
        (
            'data = "rp2"\nindex_mapping_dir = "/i"\ndataset_paths = ["0.5", "/none/a", "0.5", "/none/b"]',
            "",
            "cmd_args.dataset_paths = '/none/a.idx'",
        ),
        ('data = "c4"\nc4_root = "/none"', "", "cmd_args.c4_root = '/none/c4-train.en_6_text_document.idx'"),
    ],
)
def test_missing_paths_are_refused_on_this_machine(tmp_path: Path, args: str, extra: str, name: str) -> None:
    with pytest.raises(BadInput) as error:
        plan(tmp_path, args, extra=extra)
    text = str(error.value)
    assert text.startswith(str(tmp_path / "tests" / "tune.toml"))
    assert f"test 'tune': {'' if name.startswith('cmd_args') else 'extra_cmd_args: '}{name} does not exist" in text
    assert "\n" not in text
    assert not (tmp_path / "out").exists()
    notes = plan(tmp_path, args, SLURM, extra)
    assert any(f"test 'tune': not evaluated: whether {name}" in note.replace("extra_cmd_args: ", "") for note in notes)


@pytest.mark.parametrize(
    ("args", "base"),
    [
        (SQUAD.format("{tmp_path}"), ""),
        ('pretrained_checkpoint = "../../base/single/0/ckpt"', ""),
        ('pretrained_checkpoint = "/none/base/iter_0000003"', SAVES),
        ('pretrained_checkpoint = "/none"\nload_dir = "ckpt"', ""),
        ('pretrained_checkpoint = "$WEIGHTS/a"', ""),
    ],
)
def test_what_is_there_or_will_be_is_not_refused(tmp_path: Path, args: str, base: str) -> None:
    for system in (LOCAL, SLURM):
        notes = plan(tmp_path, args.replace("{tmp_path}", str(tmp_path)), system, base=base)
        assert not any("does not exist" in note for note in notes)


def test_a_cluster_is_judged_by_the_file_system_of_the_output(
    tmp_path: Path, monkeypatch: Any, sentence: Sentence
) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path in (tmp_path, Path("/")))
    with pytest.raises(BadInput) as caught:
        plan(tmp_path, SQUAD.format(tmp_path / "none"), SLURM)
    sentence(caught)
    assert not any("not evaluated" in note for note in plan(tmp_path, SQUAD.format(tmp_path), SLURM))
    in_container = SQUAD.format(tmp_path / "none") + 'container_image = "a.sqsh"\n'
    assert any("not evaluated" in note for note in plan(tmp_path, in_container, SLURM))


def _saved(root: Path, done: int, *, is_there: bool = True) -> None:
    root.mkdir(exist_ok=True)
    (root / "latest_checkpointed_iteration.txt").write_text(str(done))
    if is_there:
        (root / f"iter_{done:07d}").mkdir(exist_ok=True)


@pytest.mark.parametrize("key", ["load_dir", "checkpoint.load"])
def test_a_checkpoint_without_steps_left_is_refused(tmp_path: Path, sentence: Sentence, key: str) -> None:
    path = tmp_path / "ckpt"
    args, extra = f'max_steps = 6\n{key} = "{path}"', ""
    if key != "load_dir":
        args, extra = "max_steps = 6", f'"{key}" = "{path}"'
    _saved(path, 4)
    (note,) = [note for note in plan(tmp_path, args, extra=extra) if key in note]
    sentence(note)
    _saved(path, 6)
    with pytest.raises(BadInput, match=key) as caught:
        plan(tmp_path, args, extra=extra)
    sentence(caught)
    _saved(path, 7, is_there=False)  # the loop takes the newest that is there
    plan(tmp_path, args, extra=extra)
    _saved(path, 6)
    for weights in ('"checkpoint.finetune" = "true"', '"checkpoint.ckpt_step" = "3"'):
        plan(tmp_path, args, extra=f"{extra}\n{weights}")


def test_a_warm_up_that_takes_all_steps_left_is_refused(tmp_path: Path, sentence: Sentence) -> None:
    _saved(tmp_path / "ckpt", 4)
    args = f'max_steps = 6\nload_dir = "{tmp_path / "ckpt"}"'
    with pytest.raises(BadInput) as caught:
        plan(tmp_path, args, extra="[metrics]\nwarmup_steps = 2")
    sentence(caught)
    plan(tmp_path, args, extra="[metrics]\nwarmup_steps = 1")
