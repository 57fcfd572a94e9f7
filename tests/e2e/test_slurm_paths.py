"""What Slurm expands or drops: patterns in the path of a job's output, backslashes in an option."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.golden import Sentence

pytestmark = pytest.mark.slurm

COMMENTS = ["ends in \\", "a\\b", "\\", "\\\\server\\x", "it's \"q\" \\'", "100%j #c $HOME `id`"]


@pytest.fixture(scope="module")
def small(new_cluster: Callable[..., Any]) -> Any:
    return new_cluster(nodes=1)


@pytest.mark.parametrize("name", ["a%jb", "50%% off", "x%20y", "a\\b", "ends in \\"])
def test_a_path_that_slurm_would_expand_is_refused(
    sentence: Sentence, name: str, small: Any, start_run: Any, stand_in_test: Any, tmp_path: Any, nothing_left: Any
) -> None:
    run = start_run(small, [stand_in_test("t")], args=[f"--output-dir={tmp_path / name}"]).finish(2)
    assert "Slurm reads" in run.stderr
    sentence(run.stderr)
    assert not (tmp_path / name).exists()
    nothing_left(small)


@pytest.mark.parametrize("name", ["100%", "a b'c\"d$e;f#g", "new\nline"])
def test_other_paths_are_taken(name: str, small: Any, start_run: Any, stand_in_test: Any, tmp_path: Any) -> None:
    tests = [stand_in_test("t"), stand_in_test("u")]
    start_run(small, tests, args=[f"--output-dir={tmp_path / name}"]).finish(0)
    assert len(list((tmp_path / name).glob("*/[tu]/*/0/stdout.txt"))) == 2


def test_backslashes_in_an_option_arrive(small: Any, start_run: Any, stand_in_test: Any) -> None:
    for comment in COMMENTS:
        quoted = comment.replace("\\", "\\\\").replace('"', '\\"')
        run = start_run(small, [stand_in_test("t")], system=f'extra_sbatch_args = ["--comment={quoted}"]').finish(0)
        shown = small.run("squeue", "--states=all", "--noheader", "--format=%k", f"--jobs={run.job('t')}").stdout
        assert shown.strip("\n").rstrip() == comment
