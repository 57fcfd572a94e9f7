"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cloudai_mbridge.constraints import RuleSet

PATH = click.Path(path_type=Path)


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


ALLOW_UNKNOWN = click.option(
    "--allow-unknown-args",
    "on_unknown_arg",
    flag_value=_warn,
    default=None,
    type=click.UNPROCESSED,
    help="Leave unknown keys of cmd_args out with a warning.",
)

RULES = click.option(
    "--rules",
    type=click.Choice(list(RuleSet)),
    default=RuleSet.RELEASE,
    show_default=True,
    callback=lambda ctx, option, value: RuleSet(value),
    help="Whose verdict C01-C18 give on upstream points: the pinned release's, or CloudAI's.",
)


def scenario_options(*, output_dir: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add CloudAI's options for a scenario on a system."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        if output_dir:
            command = click.option(
                "--output-dir", type=PATH, help="Where results go; default: the system's output_path."
            )(command)
        command = RULES(ALLOW_UNKNOWN(command))
        command = click.option("--test-scenario", type=PATH, required=True, help="Scenario TOML.")(command)
        command = click.option("--tests-dir", type=PATH, help="Directory of the test TOMLs.")(command)
        return click.option("--system-config", type=PATH, required=True, help="System TOML.")(command)

    return add
