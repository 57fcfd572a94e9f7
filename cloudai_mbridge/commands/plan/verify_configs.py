"""`mbridge verify-configs`."""

from dataclasses import dataclass
from typing import Any

import click

from cloudai_mbridge.commands.console import print_json, show_error
from cloudai_mbridge.commands.options import ALLOW_UNKNOWN, JSON, PATH, RULES
from cloudai_mbridge.commands.plan.verify import Finding, summarize_foreign, verify
from cloudai_mbridge.errors import OK, BadInput
from cloudai_mbridge.models.loading import Warn
from cloudai_mbridge.models.test_definition import TEMPLATE


@dataclass(frozen=True)
class Findings:
    """What was found about every file. Where one is not good, the exit code is 2."""

    files: tuple[Finding, ...]


@click.command("verify-configs")
@click.argument("configs", type=PATH)
@click.option("--system-config", type=PATH, help="Also check placement on this system.")
@click.option("--tests-dir", type=PATH, help="Where scenarios find their tests.")
@click.option("--hook-dir", type=PATH, help="Directory of the hooks' TOMLs; default: as for `run`.")
@ALLOW_UNKNOWN
@RULES
@JSON
def verify_configs(on_unknown_arg: Warn | None, as_json: bool, **options: Any) -> int:
    """Check a TOML file, or all of a directory; nothing is run or written."""
    findings = []
    for finding in verify(**options, warn=on_unknown_arg):
        findings.append(finding)
        if not finding.is_good:
            show_error(finding.text)
        elif not finding.is_foreign and not as_json:
            click.echo(f"ok    {finding.path}: {finding.text}")
    if as_json:
        print_json(Findings(tuple(findings)))
    else:
        for line in summarize_foreign(findings):
            click.echo(f"skipped (not {TEMPLATE}): {line}")
    return OK if all(finding.is_good for finding in findings) else BadInput.exit_code
