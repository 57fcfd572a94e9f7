"""What pyxis, enroot, NeMo-Run and the ranks' shell would interpret, and what they take as it is."""

import pytest

from cloudai_mbridge.models.readers import (
    image_problem,
    in_enroots_spelling,
    mount_problem,
    option_problems,
    path_problem,
    variable_problems,
    word_problem,
)
from cloudai_mbridge.models.shell import absolute_mount
from tests.cases import every
from tests.golden import Sentence

RUN_A_COMMAND = ("$(id)", "`id`", '"; id; "', "$x", r"\$x", "${x:-y}", "$((1))", "a\\b", '"', "'", "$", r"\`id\`")


@every("text", RUN_A_COMMAND)
def test_enroot_gets_no_shell(text: str) -> None:
    for mount in (f"/data{text}:/x", f"/data:/x{text}", f"/data:/x:ro{text}", f"tmpfs:/x{text}"):
        for is_pasted in (False, True):
            problem = mount_problem(mount, is_pasted=is_pasted, expands=False)
            assert problem is not None, mount
            assert problem.startswith("enroot reads a mount as a line of a shell script"), problem
    assert path_problem(f"/out/{text}", is_pasted=False, expands=False)


@every(
    "mount",
    [
        "/lustre/a,b:/c",
        "/data/my set:/data",
        "/a\tb:/c",
        "/a:/b\n/c:/d",
        "/data/12:30:/x",
        "/a:/b:/c",
        "/a:b",
        "/a:",
        "/a:~/b",
        "tmpfs",
        ":/b",
        "$HF_TOKEN/a:/b",
    ],
)
def test_a_mount_that_pyxis_would_read_otherwise(sentence: Sentence, mount: str) -> None:
    for is_pasted in (False, True):
        problem = mount_problem(absolute_mount(mount) if mount != ":/b" else mount, is_pasted=is_pasted)
        assert problem is not None, mount
        sentence(problem)


@every(
    "mount",
    [
        *("/a:/b", "/a", "/a:/b:ro", "/a:/b:ro+rprivate", "./a:/b", "../a:/b", "a:/b", "a", "/a:/b:"),
        *("tmpfs:/scratch", "tmpfs:/scratch:size=10%+mode=755", "umount:/tmp", "$DATA:/x", "${DATA}/a:/x", "~/a:/b"),
        *("/a=b+c@d%e~f#g:/x", "/data/ünï/データ:/x", "$MOUNT", "/a:$TARGET", "/a:/b:$FLAGS", "/a!b:/x"),
    ],
)
def test_a_mount_that_is_right(mount: str) -> None:
    for is_pasted in (False, True):
        assert mount_problem(absolute_mount(mount), is_pasted=is_pasted) is None


def test_the_launcher_pastes_mounts_into_a_script(sentence: Sentence) -> None:
    for text in (";id", "&id", "|id", "(id)", "<a", ">a", "{1..3}"):
        assert mount_problem(f"/a{text}:/b", is_pasted=False) is None
        problem = mount_problem(f"/a{text}:/b", is_pasted=True)
        assert problem is not None
        sentence(problem)


def test_forms_of_pyxis_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    assert [*map(absolute_mount, ("tmpfs:/z", "umount:/z", " /a:/b "))] == ["tmpfs:/z", "umount:/z", "/a:/b"]
    monkeypatch.chdir(str(tmp_path))
    assert absolute_mount("data:/z") == f"{tmp_path}/data:/z"
    assert absolute_mount("./tmpfs:/z") == f"{tmp_path}/tmpfs:/z"
    assert absolute_mount("data") == f"{tmp_path}/data"


@every(
    ("image", "embedded", "upstream"),
    [
        *((image, True, True) for image in ("nvcr.io#nvidia/nemo:26.06", "ubuntu", "a/b:1", "/i/a.sqsh", "./a.sqsh")),
        *(
            (image, True, True)
            for image in ("localhost:5000#u/i", "docker://u@r.io#a/b:c", "a/b@sha256:0f", "dockerd://a:1")
        ),
        ("$oauthtoken@nvcr.io#nvidia/nemo:1", True, False),  # of enroot; a shell reads the launcher's
        *((image, True, False) for image in ("/i/a b.sqsh", "/i/$(id).sqsh", '/i/".sqsh', "/i/a;b.sqsh")),
        *((image, False, False) for image in ("/i/';id;'.sqsh", "a;id", "a$(id)", "a b", "`id`", "x'y", "/a\nb")),
        *((image, False, True) for image in ("$IMAGES/a.sqsh", "~/a.sqsh")),  # no shell reads the embedded loop's
    ],
)
def test_an_image(image: str, embedded: bool, upstream: bool) -> None:
    assert (image_problem(image, is_pasted=False, expands=False) is None) == embedded
    assert (image_problem(image, is_pasted=True) is None) == upstream


@every(
    ("given", "expected"),
    [
        ("nvcr.io/nvidia/nemo:26.06", "nvcr.io#nvidia/nemo:26.06"),
        ("docker://nvcr.io/nvidia/nemo:26.06", "docker://nvcr.io#nvidia/nemo:26.06"),
        ("$oauthtoken@nvcr.io/nvidia/nemo", "$oauthtoken@nvcr.io#nvidia/nemo"),
        ("gitlab-master.nvidia.com/a/b:latest", "gitlab-master.nvidia.com#a/b:latest"),
        ("localhost/a", "localhost#a"),
        ("host:5000/a/b", "host:5000#a/b"),
        ("nvcr.io/nvidia/nemo@sha256:0f", "nvcr.io#nvidia/nemo@sha256:0f"),
        *((same, same) for same in ("nvcr.io#nvidia/nemo:1", "nvidia/nemo:1", "ubuntu", "ubuntu:22.04", "dockerd://a")),
        *((same, same) for same in ("/nvcr.io/a", "./nvcr.io/a", "nvidia/a.b/c", "library/a:1.0", "")),
    ],
)
def test_docker_s_spelling_becomes_enroot_s(given: str, expected: str) -> None:
    assert in_enroots_spelling(given) == expected


@every(
    "word", ["a; id", "$(id)", "`id`", "a|b", "a&b", "a\nid", "a > b", "${x:-$(id)}", "$[a]", "Et|(tt|)*30,mL", "$1"]
)
def test_a_word_that_the_ranks_shell_would_interpret(word: str) -> None:
    assert word_problem(word)


@every("word", ["a", "$HOME/x", "${HOME}/x", "a b", "[1,2]", "{a:1}", "a=b", "#", "ünï", "$", "*", "~/x", "-1"])
def test_a_word_that_runs_nothing(word: str) -> None:
    assert word_problem(word) is None


@every(
    ("words", "number"),
    [
        (["--container-mounts=/a:/b,/c$(id):/d"], 1),
        (["--container-mounts", "/c`id`:/d"], 1),
        (["--container-mou=/c$x:/d"], 1),
        (["--container-env=A,HOME-$(id)"], 1),
        (["--container-image=a'b;id"], 1),
        (["--container-mounts=/a:/b,tmpfs:/c", "--container-env=A,B", "--container-image=/i/a.sqsh", "--mpi=pmix"], 0),
        (["--container-mount-home", "--container-workdir=/a b", "--comment=$(id)"], 0),
    ],
)
def test_options_of_srun_that_pyxis_reads(words: list[str], number: int) -> None:
    assert len([*option_problems(words)]) == number


@every(
    ("env", "names"),
    [
        ({"BASH_ENV": ["$(id)"]}, ["BASH_ENV"]),
        ({"BASH_ENV": ["$A"], "A": ["`id`"]}, ["BASH_ENV"]),
        ({"BASH_ENV": ["$A"], "A": ["$B"], "B": ["a", "$(id)"]}, ["BASH_ENV"]),
        ({"PS4": ["+ $(id)"]}, ["PS4"]),
        ({"PYXIS_CONTAINER_MOUNTS": ["/a:/b,/c$(id):/d"]}, ["PYXIS_CONTAINER_MOUNTS"]),
        ({"PYXIS_CONTAINER_MOUNTS": ["$M"], "M": ["/a`id`:/b"]}, ["PYXIS_CONTAINER_MOUNTS"]),
        ({"PYXIS_CONTAINER_ENV": ["A-$(id)"]}, ["PYXIS_CONTAINER_ENV"]),
        ({"BASH_ENV": ["/site/env.sh"], "A": ["$(id)"], "PYXIS_CONTAINER_MOUNTS": ["$HOME/a:/b"]}, []),
    ],
)
def test_variables_that_bash_or_pyxis_reads(env: dict[str, list[str]], names: list[str]) -> None:
    assert [name for name, _ in variable_problems(env)] == names
