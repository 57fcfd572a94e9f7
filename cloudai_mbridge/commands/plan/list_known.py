"""`mbridge list`: the recipes and the rules; `mbridge rule`: the documentation of rules."""

from collections.abc import Iterator, Mapping

import click
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.commands.console import new_console, print_json
from cloudai_mbridge.commands.options import JSON, completing
from cloudai_mbridge.constraints.rule_docs import LiftedIn, RuleDoc, documents
from cloudai_mbridge.errors import OK, BadInput, shown
from cloudai_mbridge.files.documents import fill, json_object
from cloudai_mbridge.models.toml_source import suggest
from cloudai_mbridge.recipes import load_recipe, recipe_names

_KINDS = ["recipes", "rules", "agents", "reports"]
_AGENTS = {
    "grid_search": "every point of the sweep, once; order and limits come from [sweep]",
    "tune": "the points that a search chooses, until another is not worth its cost",
}
_REPORTS = {
    "report.json": "everything, for programs",
    "report.html": "page of a run; also as report.md",
    "junit.xml": "for CI",
    "steps.csv": "every step of every run",
}


_NAMED = json_object("Named", "A name that files and options accept.", name=str, description=str)
_KNOWN_RULE = json_object(
    "KnownRule", "A rule, and what must hold.", rule_id=str, description=str, lifted=tuple[LiftedIn, ...]
)
KNOWN = json_object(
    "Known",
    "Everything that `list` can show, whatever its argument.",
    recipes=[_NAMED],
    rules=[_KNOWN_RULE],
    agents=[_NAMED],
    reports=[_NAMED],
)


@click.command("list")
@click.argument(
    "what", required=False, type=click.Choice(["recipes", "rules", "agents", "reports"], case_sensitive=False)
)
@click.option("--verbose", "-v", is_flag=True, help="Accepted as in CloudAI; nothing is left out.")
@JSON
def list_(what: str | None, verbose: bool, as_json: bool) -> int:
    """List the recipes and the rules, or one of the kinds; agents and reports as CloudAI does."""
    recipes, rules = {name: load_recipe(name).description for name in recipe_names()}, documents().values()
    if as_json:
        print_json(
            {
                "recipes": _named(recipes),
                "rules": [fill(_KNOWN_RULE, each, description=each.title) for each in rules],
                "agents": _named(_AGENTS),
                "reports": _named(_REPORTS),
            },
            KNOWN,
        )
    elif what in ("agents", "reports"):
        for name, text in (_AGENTS if what == "agents" else _REPORTS).items():
            click.echo(f"{name}: {text}")
    else:
        console = new_console()
        if what != "rules":
            table = Table("recipe", "description", title="Recipes", title_justify="left")
            for name, text in recipes.items():
                table.add_row(name, Text(text))
            console.print(table)
        if what != "recipes":
            of_rules = Table("rule", "what must hold", "lifted in", title="Rules", title_justify="left")
            for each in rules:
                lifted = "\n".join(f"{lift.since}: {lift.reason}" for lift in each.lifted)
                of_rules.add_row(each.rule_id, Text(each.title), Text(lifted))
            console.print(of_rules)
            console.print_line("details: mbridge rule RULE")
    return OK


def _named(texts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "description": text} for name, text in texts.items()]


RULE_DOCS = json_object("RuleDocs", "The documentation of the requested rules.", rules=tuple[RuleDoc, ...])


@click.command()
@click.argument("rule_id", nargs=-1, required=True, shell_complete=completing(documents))
@JSON
def rule(rule_id: tuple[str, ...], as_json: bool) -> int:
    """Explain rules: what must hold, why, an example of each verdict, the source, the releases."""
    known = documents()
    for name in rule_id:
        if name.upper() not in known:
            raise BadInput(f"no rule {shown(name)}; {suggest(name.upper(), list(known))}")
    found = tuple(known[name] for name in dict.fromkeys(map(str.upper, rule_id)))
    if as_json:
        print_json({"rules": found}, RULE_DOCS)
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
    if not found.lifted and not found.rule_id.startswith("R"):  # what a rehearsal finds, another release may not
        yield "lifted in", "none: it holds in every release"
