"""Numbers that commands take as options."""

from collections.abc import Iterator

import click
import pytest

from cloudai_mbridge.cli import cli
from cloudai_mbridge.commands.options import Number


def options(group: click.Group) -> Iterator[click.Parameter]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield from options(command) if isinstance(command, click.Group) else command.params


def test_every_number_is_finite() -> None:
    """nan is below and above no limit, so that nothing would ever reach it."""
    kinds = [option.type for option in options(cli) if isinstance(option.type, click.types.FloatParamType)]
    assert kinds
    assert all(isinstance(kind, Number) for kind in kinds), kinds


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Number(min=0).convert(text, None, None)
    assert Number(min=0).convert("0.5", None, None) == 0.5
