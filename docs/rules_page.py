"""Hook of mkdocs: the page of all rules, from their docstrings (`constraints/rule_docs.py`)."""

from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from cloudai_mbridge.constraints.rule_docs import RuleDoc, documents

PAGE = "rules.md"
_HEAD = """# Rules

For everybody with a rejected point: all rules, as `mbridge rule RULE` prints them;
[Scenarios](scenarios.md#rules) has their use.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    files.append(File.generated(config, PAGE, content="\n".join([_HEAD, *map(_section, documents().values())])))
    return files


def _section(rule: RuleDoc) -> str:
    return "\n".join([f"## {rule.rule_id}", "", f"**{_literal(rule.title)}**", "", *map(_literal, _lines(rule))])


def _literal(text: str) -> str:
    """Escape products such as tp*pp."""
    return text.replace("*", "\\*")


def _lines(rule: RuleDoc) -> Iterator[str]:
    if rule.reason:
        yield f"{rule.reason}\n"
    yield f"- passes: {rule.passes}"
    yield f"- fails: {rule.fails}"
    if rule.not_evaluated:
        yield f"- not evaluated: {rule.not_evaluated}"
    yield f"- source: {rule.source}"
    yield f"- kind: {rule.checked_for}"
    yield from (f"- lifted in Megatron-Bridge {lift.since}: {lift.reason}" for lift in rule.lifted)
    yield ""
