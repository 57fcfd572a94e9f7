"""Hooks: the scenarios that pre_test and post_test name."""

from pathlib import Path

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.loading import LoadedScenario, load_scenario
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.plan.build import build_plan
from tests.golden import Sentence

LOCAL = LocalSystem(name="here", scheduler="local")
TEST = """name = "{name}"
description = "d"
test_template_name = "{template}"
[cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
num_gpus = 2
{args}
"""
HOOK = 'name = "{name}"\n[[Tests]]\nid = "one"\ntest_name = "check"\n'
WAITING = '[[Tests]]\nid = "two"\ntest_name = "check"\ndependencies = [{type = "start_post_comp", id = "one"}]\n'


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    """A directory of two hooks, as CloudAI has them: scenarios, and their tests in `test`."""
    (tmp_path / "hook/test").mkdir(parents=True)
    (tmp_path / "hook/nccl.toml").write_text(HOOK.format(name="nccl").replace("check", "all_gather"))
    (tmp_path / "hook/file.toml").write_text(HOOK.format(name="warm_up") + WAITING)
    _write(tmp_path / "hook/test/check.toml", "check")
    _write(tmp_path / "hook/test/nccl.toml", "all_gather", "NcclTest")
    return tmp_path / "hook"


def _write(path: Path, name: str, template: str = "MegatronBridge", args: str = "") -> None:
    path.write_text(TEST.format(name=name, template=template, args=args))


def _load(hooks: Path, keys: str, *, skip: bool = False) -> LoadedScenario:
    tests = hooks.parent / "tests"
    tests.mkdir()
    _write(tests / "t.toml", "t")
    path = hooks.parent / "s.toml"
    path.write_text(f'name = "s"\n{keys}\n[[Tests]]\nid = "a"\ntest_name = "t"\n')
    return load_scenario(path, tests, hooks=None if skip else hooks)


def test_a_pre_test_goes_first_and_a_post_test_last(hooks: Path) -> None:
    plan = build_plan(_load(hooks, 'pre_test = "warm_up"\npost_test = "warm_up"'), LOCAL)
    assert [(run.test_id, run.is_gate, run.after_completion) for run in plan.runs] == [
        ("pre_test.one", True, ()),
        ("pre_test.two", True, ("pre_test.one",)),
        ("a", False, ()),
        ("post_test.one", False, ("a",)),
        ("post_test.two", False, ("post_test.one", "a")),
    ]
    assert plan.tests == ("pre_test.one", "pre_test.two", "a", "post_test.one", "post_test.two")


def test_a_check_that_cannot_run_here_is_refused(hooks: Path, sentence: Sentence) -> None:
    with pytest.raises(BadInput, match=r"s\.toml:2: pre_test:") as caught:
        _load(hooks, 'pre_test = "nccl"')
    sentence(caught)


def test_a_post_test_that_cannot_run_here_is_noted(hooks: Path) -> None:
    loaded = _load(hooks, 'post_test = "nccl"')
    assert loaded.notes == ("post_test = 'nccl': its tests of NcclTest are not run, as in CloudAI",)
    assert [run.test_id for run in build_plan(loaded, LOCAL).runs] == ["a"]


def test_hooks_can_be_skipped(hooks: Path) -> None:
    loaded = _load(hooks, 'pre_test = "nccl"\npost_test = "gone"', skip=True)
    assert loaded.notes == ("pre_test = 'nccl' is skipped, as requested", "post_test = 'gone' is skipped, as requested")
    assert [run.test_id for run in build_plan(loaded, LOCAL).runs] == ["a"]


@pytest.mark.parametrize("key", ["pre_test", "post_test"])
def test_a_hook_that_is_not_there(hooks: Path, sentence: Sentence, key: str) -> None:
    with pytest.raises(BadInput, match=f"s\\.toml:2: {key}:") as caught:
        _load(hooks, f'{key} = "gone"')
    sentence(caught)


def test_a_hook_that_is_not_there_beside_tests(hooks: Path, sentence: Sentence) -> None:
    with pytest.raises(BadInput, match=r"pre_test:") as caught:
        _load(hooks, 'pre_test = "warm"')
    sentence(caught)


def test_a_hook_without_a_point_is_refused(hooks: Path, sentence: Sentence) -> None:
    _write(hooks / "test/check.toml", "check", args="tp = 3")
    with pytest.raises(BadInput, match=r"test 'pre_test\.\w+':") as caught:
        build_plan(_load(hooks, 'pre_test = "warm_up"'), LOCAL)
    sentence(caught, hook=r"pre_test\.\w+")
