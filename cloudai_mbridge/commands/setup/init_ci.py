"""`mbridge init ci`: files that run a scenario every night, and fail a CI job when performance regresses."""

from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path

import click

from cloudai_mbridge.commands.options import PATH
from cloudai_mbridge.commands.setup.new_files import FORCE, options_of, require_points, write_files
from cloudai_mbridge.commands.setup.schema import schema_files
from cloudai_mbridge.errors import OK, BadInput

TEMPLATES = resources.files("cloudai_mbridge.commands.setup") / "ci_files"
SCRIPT, POLICY, BASELINE = Path("ci/performance.sh"), Path("ci/policy.toml"), Path("ci/baseline.toml")
# Text of the templates, replaced in the written files
_OPTIONS = "--system-config system.toml --tests-dir test_defs --test-scenario scenario.toml"
_DAY = "2027-01-31"
_DAYS = timedelta(days=14)
_GITLAB = "ci/performance.gitlab-ci.yml"
WORKFLOWS = {
    "github": (".github/workflows/performance.yml", "github.yml", ""),
    "gitlab": (
        _GITLAB,
        "gitlab.yml",
        f"change the tags in it, make a schedule, and add to .gitlab-ci.yml:\n  include: {_GITLAB}",
    ),
    "jenkins": ("Jenkinsfile", "Jenkinsfile", ""),
}


@click.command()
@click.option("--github", is_flag=True, help="Also a workflow for GitHub Actions.")
@click.option("--gitlab", is_flag=True, help="Also a job for GitLab.")
@click.option("--jenkins", is_flag=True, help="Also a Jenkinsfile.")
@click.option("--system-config", "system", type=PATH, default="system.toml", show_default=True, help="System TOML.")
@click.option("--test-scenario", "scenario", type=PATH, default="scenario.toml", show_default=True, help="Its TOML.")
@click.option("--tests-dir", type=PATH, help="Directory of the test TOMLs; default: test_defs, or the scenario's.")
@FORCE
def ci(system: Path, scenario: Path, tests_dir: Path | None, *, force: bool, **workflows: bool) -> int:
    """Write a script that runs and gates the scenario, its policy, and the workflow of a CI. Run it in the repository.

    A baseline that exists is never overwritten. Until the first one is promoted, for two weeks at most, good runs are
    enough for a green night.
    """
    for path, option in ((system, "--system-config"), (scenario, "--test-scenario")):
        if not path.exists():
            raise BadInput(f"{path}: no such file; write one with `mbridge init`, or name yours with {option}")
    places = (scenario.parent / "test_defs", Path("test_defs"))
    tests_dir = tests_dir or next(filter(Path.is_dir, places), None)
    wanted = [WORKFLOWS[name] for name, is_wanted in workflows.items() if is_wanted]
    is_local = require_points(system, scenario, tests_dir).system.is_one_machine
    day = datetime.now(UTC).date() + _DAYS
    files = {
        SCRIPT: _template("performance.sh").replace(_OPTIONS, options_of(system, scenario, tests_dir)),
        POLICY: _template("policy_local.toml" if is_local else "policy.toml"),
        **({} if BASELINE.exists() else {BASELINE: _template("baseline.toml").replace(_DAY, str(day))}),
        **{Path(path): _template(template) for path, template, _ in wanted},
    }
    write_files({**files, **schema_files(Path(), "policy")}, force=force)
    if BASELINE not in files:
        click.echo(f"kept: {BASELINE}")
    for todo in filter(None, (todo for _, _, todo in wanted)):
        click.echo(todo)
    click.echo(f"Commit them. Next:\n  sh {SCRIPT}")
    return OK


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
