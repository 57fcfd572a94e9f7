"""What `mbridge init ci` writes for pull requests: from a clone to the comment, with a stand-in for the hosting.

The stand-in speaks the part of the APIs of GitHub and GitLab that comments need, over HTTP.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.e2e.ci_project import REPOSITORY, SCENARIO, Project
from tests.http_server import Request, Server, serving

yaml = pytest.importorskip("yaml")

SCRIPT = REPOSITORY / "cloudai_mbridge" / "commands" / "setup" / "ci_files" / "comment.py"
TOKEN = "t0ken-of-the-hosting"
LISTS = {"github": "/repos/o/r/issues/7/comments", "gitlab": "/projects/3/merge_requests/7/notes"}
MARK = "<!-- mbridge gate -->"


class Hosting:
    """Comments of a pull request, of which the first hundred are people's."""

    def __init__(self) -> None:
        self.bodies: dict[int, str | None] = dict.fromkeys(range(99))
        self.bodies[99] = f"Why {MARK}?"
        self.methods: list[str] = []

    @property
    def posted(self) -> list[str]:
        return [body or "" for number, body in self.bodies.items() if number > 99]

    def answer(self, request: Request) -> tuple[int, bytes]:
        url = urlsplit(request.path)
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, b"{}"
        if request.method == "GET":
            assert url.path in LISTS.values()
            start = 100 * (int(parse_qs(url.query)["page"][0]) - 1)
            found = [{"id": number, "body": body} for number, body in self.bodies.items()]
            return 200, json.dumps(found[start : start + 100]).encode()
        self.methods.append(request.method)
        number = len(self.bodies)
        if request.method == "POST":
            assert url.path in LISTS.values()
        else:
            where = re.fullmatch(r"/repos/o/r/issues/comments/(\d+)|/projects/3/merge_requests/7/notes/(\d+)", url.path)
            assert where
            assert request.method == ("PATCH" if where[1] else "PUT")
            number = int(where[1] or where[2])
        self.bodies[number] = json.loads(request.body)["body"]
        return 201, b"{}"


@pytest.fixture
def hosting() -> Iterator[tuple[Hosting, Server]]:
    found = Hosting()
    with serving(found.answer) as server:
        yield found, server


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A repository with a baseline."""
    made = Project(tmp_path_factory.mktemp("pull"))
    made.good(f"mbridge run {SCENARIO} --output-dir results/first")
    made.good("mbridge baseline promote results/first/* --baseline ci/baseline.toml --reason first --yes")
    made.good("git init -q . && git add .github Jenkinsfile* conf systems test_defs ci schemas")
    made.good("git -c user.name=Ada -c user.email=ada@example.com commit -qm first")
    return made


def of_github(clone: Path, url: str, _: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the commands of the workflow with their environments, its expressions replaced."""
    known = {
        "github.event.pull_request.number": "7",
        "github.api_url": url,
        "github.repository": "o/r",
        "github.token": TOKEN,
        "github.server_url": "https://github.com",
        "github.run_id": "12",
    }
    (job,) = yaml.safe_load((clone / ".github/workflows/performance-pull-request.yml").read_text())["jobs"].values()
    for step in job["steps"]:
        if "run" in step:
            env = step.get("env", {}).items()
            yield step["run"], {n: re.sub(r"\$\{\{ (\S+) \}\}", lambda m: known[m[1]], text) for n, text in env}


def of_gitlab(clone: Path, url: str, _: str) -> Iterator[tuple[str, dict[str, str]]]:
    known = {"CI_API_V4_URL": url, "CI_PROJECT_ID": "3", "CI_MERGE_REQUEST_IID": "7", "CI_JOB_URL": "https://job/12"}
    (job,) = yaml.safe_load((clone / "ci/performance-merge-request.gitlab-ci.yml").read_text()).values()
    env = {name: re.sub(r"\$(\w+)", lambda match: known[match[1]], text) for name, text in job["variables"].items()}
    for command in (*job["script"], *job["after_script"]):
        yield command, {**known, **env, "COMMENT_TOKEN": TOKEN}


def of_jenkins(clone: Path, url: str, number: str) -> Iterator[tuple[str, dict[str, str]]]:
    text = (clone / "Jenkinsfile.pull-request").read_text()
    (comments,) = re.findall(r'COMMENTS = "(.*)"', text)
    address = (
        comments.replace("https://api.github.com", url).replace("OWNER/NAME", "o/r").replace("${env.CHANGE_ID}", "7")
    )
    env = {"BUILD_NUMBER": number, "BUILD_URL": "https://job/12", "PULL_REQUEST": "7", "COMMENTS": address}
    run, comment = re.findall(r"\bsh '(.*)'", text)
    yield run, env
    yield comment, {**env, "COMMENT_TOKEN": TOKEN}


@pytest.mark.long
@pytest.mark.parametrize("steps", [of_github, of_gitlab, of_jenkins])
def test_from_a_clone_to_the_comment(project: Project, hosting: Any, tmp_path: Path, steps: Any) -> None:
    (project.root / "slow").unlink(missing_ok=True)
    found, server = hosting
    clone, history = tmp_path / "clone", tmp_path / "history.sqlite"
    project.good(f"git clone -q {project.root} {clone}")

    def job(number: str) -> int:
        """Run the job's commands, the comment after a failure too; return the gate's exit code."""
        project.good(f"git -C {clone} clean -ffdxq")
        (gate, env), (comment, own) = steps(clone, server.url, number)
        done = project.run(gate, clone, {**env, "MBRIDGE_HISTORY": str(history)})
        posted = project.run(comment, clone, own)
        assert posted.returncode == 0, posted.stderr
        leaked = [path for path in clone.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
        assert not leaked
        return done.returncode

    assert job("1") == 0
    (body,) = found.posted
    assert "slower than the baseline" in body
    (project.root / "slow").touch()
    assert job("2") == 10
    (body,) = found.posted
    assert "times as slow" in body or "slower" in body
    assert "```sh\nmbridge baseline promote results/" in body
    assert re.search(r"\n\[The job\]\(https://\S+12\)$", body)
    assert len(found.methods) == 2, "one comment, replaced"
    assert not history.exists(), "the trend is of what was merged"


def post(file: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, SCRIPT, file], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "ended before its gate"), ("# no\n" + "| row |\n" * 20_000, "The rest is in the job's files")],
)
def test_a_missing_and_a_long_summary(hosting: Any, tmp_path: Path, text: str | None, words: str) -> None:
    found, server = hosting
    file = tmp_path / "gate.md"
    if text:
        file.write_text(text)
    done = post(file, COMMENTS=server.url + LISTS["github"], COMMENT_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    (body,) = found.posted
    assert body.startswith(MARK)
    assert words in body
    assert len(body) < 65_536


@pytest.mark.parametrize("env", [{"COMMENT_TOKEN": "wr0ng"}, {}])
def test_a_refused_comment_is_one_line_without_the_token(hosting: Any, tmp_path: Path, env: Mapping[str, str]) -> None:
    done = post(tmp_path / "gate.md", COMMENTS=hosting[1].url + LISTS["gitlab"], **env)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "wr0ng" not in done.stderr
