"""Which values of a test, a system and a run reach programs that would interpret them: `models.readers` knows these."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudai_mbridge.megatron_bridge.release import install_root
from cloudai_mbridge.models.loading import LoadedTest
from cloudai_mbridge.models.readers import (
    image_problem,
    in_enroots_spelling,
    mount_problem,
    names_image,
    option_problems,
    path_problem,
    reached_problem,
    variable_problems,
)
from cloudai_mbridge.models.shell import absolute_mount
from cloudai_mbridge.models.system import SlurmSystem, System, slurm_of
from cloudai_mbridge.plan.launchers import RunLauncher, launchers_of
from cloudai_mbridge.sweep.expand import ENV

_REMEDY = "use a value without it"


def problems_of_values(test: LoadedTest, system: System) -> Iterator[str]:
    """Yield a line for every value of a test and its system that a reader behind bash would interpret."""
    where, env = f"test {test.run.id!r}", _variables(test, system)
    for name, problem in variable_problems(env):
        yield f"{where}: extra_env_vars.{name}: {problem}; {_REMEDY}"
    if system.is_one_machine:
        return
    system = slurm_of(system)
    options = (
        (f"system {system.name!r}: extra_sbatch_args", system.extra_sbatch_args),
        (f"system {system.name!r}: extra_srun_args", shlex.split(system.extra_srun_args or "")),
        (f"{where}: extra_srun_args", shlex.split(test.run.extra_srun_args or "")),
    )
    yield from (f"{key}: {problem}; {_REMEDY}" for key, words in options for problem in option_problems(words))
    for launcher in launchers_of(test.definition):
        is_pasted = launcher.pastes_words
        # the launcher gets a file of this machine or an installed one: `interpreted_words` checks its command line
        for image in () if is_pasted else _texts(test, "container_image"):
            if reason := image_problem(image, is_pasted=False, expands=False):
                yield f"{where}: cmd_args.container_image: {image!r}: {reason}; {_REMEDY}"
        if is_pasted or uses_container(test, system):
            yield from (f"{where}: {line}; {_REMEDY}" for line in _of_mounts(test, system, launcher, env))


def uses_container(test: LoadedTest, system: SlurmSystem) -> bool:
    """Return whether a point of the embedded loop may run in a container."""
    words = [*shlex.split(system.extra_srun_args or ""), *shlex.split(test.run.extra_srun_args or "")]
    return any(_texts(test, "container_image")) or names_image(words)


def _of_mounts(
    test: LoadedTest, system: SlurmSystem, launcher: RunLauncher, env: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield what is wrong with the mounts of a test, each after its key."""
    is_pasted = launcher.pastes_words
    custom = [mount for text in _texts(test, "custom_mounts") for mount in text.split(",")]
    given = {"extra_container_mounts": test.definition.extra_container_mounts, "cmd_args.custom_mounts": custom}
    for key, mounts in given.items():
        for mount in filter(str.strip, mounts):
            problem = mount_problem(absolute_mount(mount), is_pasted=is_pasted)
            # the launcher's command line is expanded with the environment of mbridge, not of the test
            if problem := problem or (None if is_pasted else reached_problem([mount], env)):
                yield f"{key}: {mount!r}: {problem}"
    if not is_pasted:  # as an argument of the launcher it is checked with its command line
        for path in _texts(test, "nemo_home"):
            if problem := path_problem(path, is_pasted=False) or reached_problem([path], env):
                yield f"cmd_args.nemo_home: {path!r}: {problem}"
        return
    for repo in test.definition.git_repos:
        if repo.mount_as and (problem := path_problem(repo.mount_as, is_pasted=True)):
            yield f"git_repos: mount_as = {repo.mount_as!r}: {problem}"
    if system.install_path and (problem := path_problem(str(install_root(system)), is_pasted=True, expands=False)):
        yield f"install_path of system {system.name!r}: {problem}"


def problem_of_directory(directory: Path, *, is_pasted: bool) -> str | None:
    """Return why the directories of runs cannot be mounted. is_pasted: as of `path_problem`."""
    return path_problem(str(directory), is_pasted=is_pasted, expands=False)


def notes_on_images(test: LoadedTest, system: System | None) -> Iterator[str]:
    """Yield a line for every image in Docker's spelling."""
    if system is None or not system.is_one_machine:
        for image in dict.fromkeys(_texts(test, "container_image")):
            if (written := in_enroots_spelling(image.strip())) != image.strip():
                yield f"container_image {image!r} is passed on as {written!r}, which is enroot's spelling"


def _texts(test: LoadedTest, name: str) -> list[str]:
    """Return the values of an argument, also of points that the sweep adds."""
    values = [getattr(test.definition.cmd_args, name), *(each.get(name) for each in test.definition.sweep.include)]
    return [text for value in values for text in (value if isinstance(value, list) else [value]) if text]


def _variables(test: LoadedTest, system: System) -> dict[str, list[str]]:
    """Return the values of a job's variables, also of points that the sweep adds."""
    found: dict[str, list[str]] = {}

    def add(variables: Iterable[tuple[str, Any]]) -> None:
        for name, value in variables:
            found.setdefault(name, []).extend(map(str, value if isinstance(value, list) else [value]))

    add(system.global_env_vars.items())
    add(test.definition.extra_env_vars.items())
    for pattern in test.definition.sweep.include:
        add((name.removeprefix(ENV), value) for name, value in pattern.items() if name.startswith(ENV))
    return found
