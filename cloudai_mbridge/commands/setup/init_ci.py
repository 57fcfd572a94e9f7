"""`mbridge init ci`: files that run a scenario every night and for pull requests, and fail on a regression."""

from collections.abc import Mapping
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
COMMENT = Path("ci/comment.py")
# Text of the templates, replaced in the written files
_OPTIONS = "--system-config system.toml --tests-dir test_defs --test-scenario scenario.toml"
_DAY = "2027-01-31"
_DAYS = timedelta(days=14)
_GITLAB, _GITLAB_CHANGE = "ci/performance.gitlab-ci.yml", "ci/performance-merge-request.gitlab-ci.yml"
_JENKINS_CHANGE = "Jenkinsfile.pull-request"
# Of each hosting: its files with their templates, and the remaining steps
WORKFLOWS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "github": (
        {
            ".github/workflows/performance.yml": "github.yml",
            ".github/workflows/performance-pull-request.yml": "github-pull-request.yml",
        },
        "require approval of workflows of forks in the repository's settings (Actions, General)",
    ),
    "gitlab": (
        {_GITLAB: "gitlab.yml", _GITLAB_CHANGE: "gitlab-merge-request.yml"},
        "change the tags in them, make a schedule, set the masked variable COMMENT_TOKEN to a project access token"
        f" (api), and add to .gitlab-ci.yml:\n  include: [{_GITLAB}, {_GITLAB_CHANGE}]",
    ),
    "jenkins": (
        {"Jenkinsfile": "Jenkinsfile", _JENKINS_CHANGE: "Jenkinsfile.pull-request"},
        f"set OWNER/NAME in {_JENKINS_CHANGE}, make a multibranch pipeline with it, and store a token that may comment"
        " as the secret text performance-comment",
    ),
}


@click.command()
@click.option("--github", is_flag=True, help="Also workflows for GitHub Actions.")
@click.option("--gitlab", is_flag=True, help="Also jobs for GitLab.")
@click.option("--jenkins", is_flag=True, help="Also Jenkinsfiles.")
@click.option("--system-config", "system", type=PATH, default="system.toml", show_default=True, help="System TOML.")
@click.option("--test-scenario", "scenario", type=PATH, default="scenario.toml", show_default=True, help="Its TOML.")
@click.option("--tests-dir", type=PATH, help="Directory of the test TOMLs; default: test_defs, or the scenario's.")
@FORCE
def ci(system: Path, scenario: Path, tests_dir: Path | None, *, force: bool, **workflows: bool) -> int:
    """Write a script that runs and gates the scenario, its policy, and the workflows of a CI. Run it in the repository.

    A baseline that exists is never overwritten. Until the first one is promoted, for two weeks at most, good runs are
    enough for a green night. The workflow of a pull request posts the gate's summary as its comment.
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
        **({COMMENT: _template("comment.py")} if wanted else {}),
        **{Path(path): _template(template) for templates, _ in wanted for path, template in templates.items()},
    }
    write_files({**files, **schema_files(Path(), "policy")}, force=force)
    if BASELINE not in files:
        click.echo(f"kept: {BASELINE}")
    for _, todo in wanted:
        click.echo(todo)
    click.echo(f"Commit them. Next:\n  sh {SCRIPT}")
    return OK


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
