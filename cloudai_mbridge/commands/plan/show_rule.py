"""`mbridge rule`: the documentation of rules."""

from collections.abc import Iterator
from dataclasses import dataclass

import click

from cloudai_mbridge.commands.console import new_console, print_json
from cloudai_mbridge.commands.options import JSON
from cloudai_mbridge.constraints.rule_docs import RuleDoc, documents
from cloudai_mbridge.errors import OK, BadInput, shown
from cloudai_mbridge.models.toml_source import suggest


@dataclass(frozen=True)
class RuleDocs:
    """The documentation of the requested rules."""

    rules: tuple[RuleDoc, ...]


@click.command()
@click.argument("rule_id", nargs=-1, required=True)
@JSON
def rule(rule_id: tuple[str, ...], as_json: bool) -> int:
    """Explain rules: what must hold, why, an example of each verdict, the source, the releases."""
    known = documents()
    for name in rule_id:
        if name.upper() not in known:
            raise BadInput(f"no rule {shown(name)}; {suggest(name.upper(), list(known))}")
    found = tuple(known[name] for name in dict.fromkeys(map(str.upper, rule_id)))
    if as_json:
        print_json(RuleDocs(found))
        return OK
    console = new_console()
    for number, each in enumerate(found):
        if number:
            console.print_line("")
        console.print_line(f"{each.rule_id}  {each.title}", style="bold")
        for name, text in _facts(each):
            console.print_line(f"  {name:<15}{text}")
    return OK


def _facts(found: RuleDoc) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of everything about a rule, except its title."""
    parts = {"why": found.reason, "passes": found.passes, "fails": found.fails, "not evaluated": found.not_evaluated}
    yield from ((name, text) for name, text in parts.items() if text)
    yield "source", found.source
    yield "kind", found.checked_for
    for lift in found.lifted:
        yield "lifted in", f"{lift.since}: {lift.reason}"
    if not found.lifted:
        yield "lifted in", "no release"
