"""`mbridge install` and `mbridge uninstall`."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from cloudai_mbridge.errors import OK, BadInput, MBridgeError, ToolFailure
from cloudai_mbridge.install.installables import EXTRA_PACKAGES
from cloudai_mbridge.install.run import install_all, uninstall_all
from cloudai_mbridge.models.loading import TEMPLATE_KEY, find_test_files, load_scenario, load_system, validate
from cloudai_mbridge.models.test_definition import TEMPLATE, TestDefinition

PACKAGES_VARIABLE = "MBRIDGE_NEMO_RUN_PACKAGES"
_PATH = click.Path(path_type=Path)


_INSTALL_HELP = f"""Install what tests of the upstream launcher need: repositories, NeMo-Run, container images.

Existing installations are kept. ${PACKAGES_VARIABLE} holds the packages, separated by blanks, that go into the
environment in addition to NeMo-Run; default: {" ".join(EXTRA_PACKAGES)}."""
_UNINSTALL_HELP = """Remove what `install` has installed for these tests, and nothing else."""


def _command(name: str, work: Callable[..., tuple[str, ...]], text: str) -> click.Command:
    def callback(system_config: Path, tests_dir: Path | None, test_scenario: Path | None, **_: Path | None) -> int:
        definitions = _definitions(tests_dir, test_scenario)
        install_path = _install_path(system_config)
        given = os.environ.get(PACKAGES_VARIABLE)
        packages = EXTRA_PACKAGES if given is None else tuple(given.split())
        with _ended_by_sigterm():
            failures = work(definitions, install_path, click.echo, packages=packages)
        if failures:
            raise ToolFailure("\n".join(failures))
        return OK

    options: list[Any] = [
        click.Option(
            ["--system-config"],
            type=_PATH,
            required=True,
            envvar="CLOUDAI_SYSTEM_CONFIG",
            help="System TOML, also named by $CLOUDAI_SYSTEM_CONFIG; its install_path is used.",
        ),
        click.Option(["--tests-dir"], type=_PATH, help="Directory of the test TOMLs."),
        click.Option(["--test-scenario"], type=_PATH, help="Scenario TOML; without it, all tests of the directory."),
        click.Option(["--output-dir"], type=_PATH, help="Accepted as in CloudAI; nothing is written there."),
        click.Option(["--hook-dir"], type=_PATH, help="Accepted as in CloudAI; hooks need nothing installed."),
    ]
    return click.Command(name, callback=callback, params=options, help=text)


def _definitions(tests_dir: Path | None, test_scenario: Path | None) -> list[TestDefinition]:
    if test_scenario is not None:
        return [test.definition for test in load_scenario(test_scenario, tests_dir, hooks=None).tests]
    if tests_dir is None:
        raise BadInput("no tests to install for; give --tests-dir or --test-scenario")
    return [
        validate(TestDefinition, source.data, source)
        for source in find_test_files(tests_dir)
        if source.data.get(TEMPLATE_KEY, TEMPLATE) == TEMPLATE
    ]


def _install_path(system_config: Path) -> Path:
    """Return the system's install_path; a relative path is below the current directory, like output_path."""
    path = load_system(system_config).install_path
    if not path:
        raise BadInput(f"{system_config}: install_path: is missing; write the directory to install into")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise BadInput(f"{system_config}: install_path: {path!r} names an unknown home; write it in full") from None


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the tool that is running and remove its unfinished work, as SIGINT does."""

    def end(number: int, frame: FrameType | None) -> None:
        error = MBridgeError("interrupted by SIGTERM; unfinished work was removed")
        error.exit_code = 128 + number
        raise error

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


install = _command("install", install_all, _INSTALL_HELP)
uninstall = _command("uninstall", uninstall_all, _UNINSTALL_HELP)
