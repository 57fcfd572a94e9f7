"""What a test needs to be installed before it can run."""

from dataclasses import dataclass

from cloudai_mbridge.models.test_definition import GitRepo


@dataclass(frozen=True)
class DockerImage:
    """A container image by its address."""

    url: str


@dataclass(frozen=True)
class PythonExecutable:
    """The Python of an environment into which a repository is installed."""

    git_repo: GitRepo
