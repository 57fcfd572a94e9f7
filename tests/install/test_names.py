"""What may reach git, enroot and pip."""

import pytest

from cloudai_mbridge.install.installables import enroot_uri, problem_of_commit, problem_of_image, problem_of_url
from tests.cases import every
from tests.golden import Sentence


@every(
    ("image", "uri"),
    [
        ("nvcr.io#nvidia/nemo:26.02.00", "docker://nvcr.io#nvidia/nemo:26.02.00"),
        ("nvcr.io/nvidia/nemo:26.06.00", "docker://nvcr.io#nvidia/nemo:26.06.00"),
        ("docker://nvcr.io#nvidia/nemo:26.02.00", "docker://nvcr.io#nvidia/nemo:26.02.00"),
        ("docker://nvcr.io/nvidia/nemo:26.02.00", "docker://nvcr.io#nvidia/nemo:26.02.00"),
        ("$oauthtoken@nvcr.io#nvidia/nemo:1", "docker://$oauthtoken@nvcr.io#nvidia/nemo:1"),
        ("host:5000/team/image:1", "docker://host:5000#team/image:1"),
        ("localhost/image", "docker://localhost#image"),
        ("ubuntu:24.04", "docker://ubuntu:24.04"),
        ("nvidia/cuda:13.0.0-base", "docker://nvidia/cuda:13.0.0-base"),
        ("nvcr.io/nvidia/nemo@sha256:0a1b", "docker://nvcr.io#nvidia/nemo:sha256:0a1b"),
    ],
)
def test_image_becomes_the_uri_that_enroot_reads(image: str, uri: str) -> None:
    assert problem_of_image(image) is None
    assert enroot_uri(image) == uri


@every(
    "image",
    [
        *("-o/etc/passwd", "--help", "nvcr.io#nvidia/nemo:1 --output x", "nvcr.io#nvidia/nemo:$(touch pwned)"),
        *("nvcr.io#nvidia/nemo:1;touch pwned", "nvcr.io#nvidia/nemo:1\ntouch pwned", "a#b#c", "docker://docker://x"),
        *("dockerd://image", "nvcr.io#NVIDIA/nemo:1", ""),
    ],
)
def test_what_is_no_image_is_refused(image: str) -> None:
    assert problem_of_image(image)


def test_an_image_that_is_no_uri(sentence: Sentence) -> None:
    for image in ("/images/none.sqsh", "./none.sqsh", "../none.sqsh"):
        assert "no such image file" in (problem_of_image(image) or "")
    with pytest.raises(ValueError) as caught:
        enroot_uri("-x")
    sentence(caught)


@every(
    "url",
    [
        *("https://github.com/NVIDIA-NeMo/Run.git", "http://git.example.org:8080/a/b.git"),
        *("ssh://git@github.com/NVIDIA-NeMo/Run.git", "git@github.com:NVIDIA-NeMo/Run.git", "git://example.org/a"),
        *("file:///srv/git/a;b$(x)'&.git", "/srv/git/a.git"),
    ],
)
def test_addresses_of_repositories_are_taken(url: str) -> None:
    assert problem_of_url(url) is None


@every(
    "url",
    [
        *("", "-x", "--upload-pack=touch pwned", "ext::sh -c 'touch pwned'", "ext::sh", "fd::7"),
        *("ssh://-oProxyCommand=touch/x", "ssh://git@-oProxyCommand=touch/x", "git@-oProxyCommand=touch:x"),
        *("https://example.org/a\nb", "https://example.org/a b", "https://[broken/x", "gopher://example.org/a"),
        "relative/path",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    assert problem_of_url(url)


@every(
    "url",
    [
        *("https://user:hunter2@example.org/a", "https://hunter2@example.org/a", "ssh://git:hunter2@example.org/a"),
        *("ftp://user:hunter2@example.org/a", "https://user:hunter2@[broken/a"),
        *("https://user:hunter2@example.org/a b", "-https://hunter2@example.org/a"),
        *("ext::https://user:hunter2@example.org/a", "user:hunter2@example.org:a"),
    ],
)
def test_address_with_a_credential_is_refused_and_not_repeated(url: str) -> None:
    problem, of_image = problem_of_url(url), problem_of_image("user:hunter2@nvcr.io#nvidia/nemo:1")
    assert problem
    assert "credential" in str(of_image)
    assert "hunter2" not in f"{problem} {of_image}"


@every(
    ("commit", "is_taken"),
    [
        *(
            (commit, True)
            for commit in ("v0.3.0", "main", "feature/x-1", "0a1b2c3", "HEAD", "refs/tags/v1", "r1;x", "é")
        ),
        *((commit, False) for commit in ("", "-x", "--upload-pack=x", "a:b", "+main", "^main", "main~1", "a..b")),
        *((commit, False) for commit in ("main@{1}", "a b", "a\n", "*", "a.lock")),
    ],
)
def test_names_of_commits(commit: str, is_taken: bool) -> None:
    assert (problem_of_commit(commit) is None) is is_taken
