"""docs/ci.md and what `mbridge init ci` writes: the page shows it, a CI can read it, and it does what the page says."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from cloudai_mbridge.errors import NonePromoted
from cloudai_mbridge.gate.policy import load_policy
from tests.e2e.ci_project import REPOSITORY, Project

yaml = pytest.importorskip("yaml")

PAGE = REPOSITORY / "docs" / "ci.md"
TEMPLATES = REPOSITORY / "cloudai_mbridge" / "commands" / "setup" / "ci_files"


def fences() -> Iterator[tuple[str, str]]:
    """Yield the language and the text of every fenced block of the page."""
    for token in MarkdownIt().parse(PAGE.read_text()):
        if token.type == "fence":
            yield token.info, token.content


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("ci"))


def template(name: str) -> str:
    return (TEMPLATES / name).read_text()


def test_the_page_shows_what_is_written() -> None:
    shown = [text for _, text in fences()]
    names = ("performance.sh", "policy.toml")
    assert [name for name in names if template(name) not in shown] == []


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", PAGE.read_text())
    assert not [link for link in links if not (PAGE.parent / link).exists()]


def test_a_ci_can_read_the_workflows() -> None:
    github, gitlab = yaml.safe_load(template("github.yml")), yaml.safe_load(template("gitlab.yml"))
    assert set(github) == {"name", True, "permissions", "concurrency", "jobs"}  # YAML 1.1 reads "on" as true
    (cron,) = github[True]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", cron["cron"])
    assert github["permissions"] == {"contents": "read"}
    (job,) = github["jobs"].values()
    assert set(job) == {"runs-on", "timeout-minutes", "steps"}
    for step in job["steps"]:
        assert ("run" in step) != ("uses" in step)
        assert set(step) <= {"name", "if", "run", "uses", "with"}
        assert "${{" not in step.get("run", ""), "what GitHub puts into a script is code"
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))
    (job,) = gitlab.values()
    assert set(job) == {"tags", "rules", "resource_group", "timeout", "script", "artifacts"}
    assert all(set(rule) == {"if"} for rule in job["rules"])
    for name, own in (("Jenkinsfile", {"triggers", "post"}), ("Jenkinsfile.pull-request", {"environment"})):
        jenkins = template(name)
        assert all(jenkins.count(a) == jenkins.count(b) for a, b in ("{}", "()"))
        sections = set(re.findall(r"^    (\w+)\b", jenkins, re.MULTILINE))
        assert sections == {"agent", "options", "stages", *own}


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ("vendor.github-workflows", "github.yml"),
        ("vendor.github-workflows", "github-pull-request.yml"),
        ("vendor.gitlab-ci", "gitlab.yml"),
        ("vendor.gitlab-ci", "gitlab-merge-request.yml"),
    ],
)
def test_the_public_schemas_accept_the_workflows(schema: str, name: str) -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, TEMPLATES / name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_pull_requests_of_forks_are_not_run() -> None:
    """A fork's author could put any command into the files that the workflow runs."""
    github, gitlab = yaml.safe_load(template("github-pull-request.yml")), template("gitlab-merge-request.yml")
    assert set(github[True]) == {"pull_request"}, "pull_request_target has the repository's secrets"
    (job,) = github["jobs"].values()
    assert job["if"] == "github.event.pull_request.head.repo.full_name == github.repository"
    assert not [step for step in job["steps"] if "${{" in step.get("run", "")], "what GitHub puts into a script is code"
    assert "$CI_MERGE_REQUEST_SOURCE_PROJECT_ID == $CI_PROJECT_ID" in gitlab
    assert "!env.CHANGE_FORK" in template("Jenkinsfile.pull-request")


def test_the_script_is_one(tmp_path: Path) -> None:
    assert subprocess.run(["sh", "-n"], input=template("performance.sh"), text=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["policy.toml", "policy_local.toml"])
def test_the_policies_are_good(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(template(name))
    assert load_policy(path).baseline_path == tmp_path / "baseline.toml"


@pytest.mark.long
def test_the_page_can_be_followed(project: Project) -> None:
    (project.root / "broken").touch()
    assert project.run("sh ci/performance.sh broken").returncode == 1, "no baseline yet, and a run failed"
    (project.root / "broken").unlink()
    promote = re.findall(r"with: (mbridge baseline promote .*)", project.good("sh ci/performance.sh early"))
    assert "ci/baseline.toml, 1 point" in project.good(f"{promote[0]} --yes")

    github = yaml.safe_load((project.root / ".github/workflows/performance.yml").read_text())
    gitlab = yaml.safe_load((project.root / "ci/performance.gitlab-ci.yml").read_text())
    jenkins = re.findall(r"sh '(.*)'", (project.root / "Jenkinsfile").read_text())
    steps = [step["run"] for step in github["jobs"]["nightly"]["steps"] if "run" in step]
    for commands in (*steps, *gitlab["performance"]["script"], *jenkins):
        project.good(commands)
    assert "pass" in project.summary.read_text()
    uploaded = github["jobs"]["nightly"]["steps"][-1]["with"]["path"].split()
    kept = gitlab["performance"]["artifacts"]
    archived = re.findall(r"results/\$\{env.BUILD_NUMBER\}(/[^\"]+)", (project.root / "Jenkinsfile").read_text())
    assert len(archived) == 2
    for pattern in (*uploaded, *kept["paths"], *kept["reports"]["junit"], *(f"results/7{path}" for path in archived)):
        assert list(project.root.glob(pattern)), f"{pattern} names nothing"

    (project.root / "slow").touch()
    assert project.run("sh ci/performance.sh slow").returncode == 10
    assert "regression" in (project.root / "results/slow/gate.md").read_text()

    (project.root / "ci/baseline.toml").unlink()
    gone = project.run("sh ci/performance.sh gone")
    assert (gone.returncode, "there is no baseline yet" in gone.stderr) == (2, True)


def test_the_table_has_every_exit_code_of_the_gate() -> None:
    from cloudai_mbridge.gate.verdict import EXIT_CODES, IMPROVEMENT_EXIT_CODE

    listed = {int(code) for code in re.findall(r"\*\*(\d+)\*\*", PAGE.read_text())}
    assert listed == {2, 3, NonePromoted.exit_code, IMPROVEMENT_EXIT_CODE, *EXIT_CODES.values()}
