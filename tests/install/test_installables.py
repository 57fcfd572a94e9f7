"""From definitions to what they need."""

from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.install.installables import EXTRA_PACKAGES, ImageInstall, PythonEnvInstall, RepoInstall
from cloudai_mbridge.install.run import installables_of
from cloudai_mbridge.models.test_definition import NEMO_RUN, TestDefinition
from tests.golden import Sentence

BRIDGE = {"url": "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", "commit": "v0.3.0"}
ARGS = {"model_family_name": "f", "model_recipe_name": "r", "hf_token": "t"}


def definition(args: dict[str, Any] | None = None, **fields: Any) -> TestDefinition:
    data = {"name": "t", "description": "d", "git_repos": [BRIDGE], "cmd_args": {**ARGS, **(args or {})}, **fields}
    return TestDefinition.model_validate(data)


def test_upstream_test_needs_image_environment_and_repositories() -> None:
    found = installables_of([definition({"container_image": " nvcr.io#nvidia/nemo:26.02.00 "})])
    assert found == [
        ImageInstall("nvcr.io#nvidia/nemo:26.02.00"),
        PythonEnvInstall(RepoInstall(NEMO_RUN.url, NEMO_RUN.commit), EXTRA_PACKAGES),
        RepoInstall(BRIDGE["url"], "v0.3.0"),
    ]
    assert installables_of([definition({"launcher": "embedded", "container_image": "-x"})]) == []


def test_two_tests_share_what_they_share() -> None:
    own = {"url": "https://example.org/run.git", "commit": "r1"}
    found = installables_of([definition(), definition(), definition(nemo_run_repo=own)])
    assert len(found) == 3
    assert PythonEnvInstall(RepoInstall(own["url"], "r1")) in found


def test_every_value_of_an_axis_is_needed() -> None:
    args = {"container_image": ["a:1", "b:1"], "launcher": ["embedded", "megatron_bridge"]}
    assert {ImageInstall("a:1"), ImageInstall("b:1")} < set(installables_of([definition(args)]))


def test_existing_file_is_no_image_to_import(tmp_path: Path, sentence: Sentence) -> None:
    image = tmp_path / "nemo.sqsh"
    with pytest.raises(BadInput) as caught:
        installables_of([definition({"container_image": str(image)})])
    sentence(caught)
    image.touch()
    found = installables_of([definition({"container_image": str(image)})])
    assert not [item for item in found if isinstance(item, ImageInstall)]


def test_one_wish_for_submodules_counts_for_the_clone_of_all() -> None:
    repos = [BRIDGE, {**BRIDGE, "init_submodules": True}]
    found = installables_of([definition(git_repos=repos, nemo_run_repo=BRIDGE)])
    clone = RepoInstall(BRIDGE["url"], "v0.3.0", True)
    assert found == [PythonEnvInstall(clone), clone]


def test_every_unusable_value_is_named_with_its_test_and_key() -> None:
    repos = [BRIDGE, {"url": "-x", "commit": "--y"}]
    with pytest.raises(BadInput) as caught:
        installables_of([definition({"container_image": "-z"}, git_repos=repos)], packages=("-r/etc/passwd",))
    assert [line.partition(" begins")[0].partition(" is no")[0] for line in str(caught.value).splitlines()] == [
        "extra packages: '-r/etc/passwd'",
        "test 't': cmd_args.container_image: '-z'",
        "test 't': git_repos[1].url: '-x'",
        "test 't': git_repos[1].commit: '--y'",
    ]
