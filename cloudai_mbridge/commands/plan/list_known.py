"""`mbridge list`: the recipes and the rules."""

import click
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.commands.console import new_console
from cloudai_mbridge.constraints.engine import RULES as ALL_RULES
from cloudai_mbridge.constraints.lifts import LIFTS
from cloudai_mbridge.constraints.upstream import rule_id as rule_id_of
from cloudai_mbridge.errors import OK
from cloudai_mbridge.recipes import load_recipe, recipe_names

_AGENTS = {
    "grid_search": "every point of the sweep, once; order and limits come from [sweep]",
    "tune": "the points that a search chooses, until another is not worth its cost",
}
_REPORTS = {
    "report.json": "everything, for programs",
    "report.html": "for people; also as report.md",
    "junit.xml": "for CI",
    "steps.csv": "every step of every run",
}


@click.command("list")
@click.argument("what", required=False, type=click.Choice(["agents", "reports"], case_sensitive=False))
@click.option("--verbose", "-v", is_flag=True, help="Accepted as in CloudAI; nothing is left out.")
def list_(what: str | None, verbose: bool) -> int:
    """List the recipes and the rules; or the agents, or the reports, as CloudAI does."""
    if what:
        for name, text in (_AGENTS if what == "agents" else _REPORTS).items():
            click.echo(f"{name}: {text}")
        return OK
    recipes = Table("recipe", "description", title="Recipes", title_justify="left")
    for name in recipe_names():
        recipes.add_row(name, Text(load_recipe(name).description))
    rules = Table("rule", "what must hold", "lifted in", title="Rules", title_justify="left")
    for rule in ALL_RULES:
        rule_id = rule_id_of(rule)
        lifted = "\n".join(f"{lift.since}: {lift.reason}" for lift in LIFTS.get(rule_id, ()))
        rules.add_row(rule_id, Text((rule.__doc__ or "").splitlines()[0]), Text(lifted))
    console = new_console()
    console.print(recipes)
    console.print(rules)
    return OK
