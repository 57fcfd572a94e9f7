"""`mbridge watch --html` while a real run goes on, in a real browser."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.golden import Sentence
from tests.report.html import conftest as page_fixtures

pytestmark = pytest.mark.slurm

browser = page_fixtures.browser
GUARD_MS = 600_000
TILES = "[...document.querySelectorAll('ul.tiles li')].map(li => li.textContent.replace(/[^a-z0-9]/g, '')).join(' ')"


@pytest.fixture(scope="module")
def sandbox(new_cluster: Any) -> Any:
    return new_cluster(nodes=2)


class Reader:
    """A tab with the page, and everything about which the browser complains."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.complaints: list[str] = []
        self.requests: set[str] = set()
        self.context = browser.new_context(viewport={"width": 1280, "height": 900})
        self.context.set_default_timeout(GUARD_MS)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.add(request.url))
        self.page.goto(path.as_uri())

    def wait_for(self, script: str) -> None:
        """Wait, across reloads, until a script is true."""
        self.page.wait_for_function(f"() => {script}", timeout=GUARD_MS, polling=100)

    def pause(self) -> None:
        while self.page.inner_text("#pause") != "Continue":
            self.page.click("#pause")

    def log_links(self) -> dict[str, str]:
        links = self.page.eval_on_selector_all("#rows .logs a", "all => all.map(a => [a.textContent, a.href])")
        return dict(links)

    def serious(self) -> list[str]:
        """Return what axe finds that is serious or critical."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [violation["id"] for violation in found if violation["impact"] in ("serious", "critical")]

    def read(self, url: str) -> str:
        tab = self.context.new_page()
        tab.goto(url)
        text: str = tab.inner_text("body")
        tab.close()
        return text


def test_the_page_follows_the_run(
    browser: Any, start_run: Any, stand_in_test: Any, until: Any, sandbox: Any, tmp_path: Path
) -> None:
    go, path = tmp_path / "go", tmp_path / "pages" / "live 1.html"
    path.parent.mkdir()
    tests = [
        stand_in_test("good"),
        stand_in_test("bad", {"at": 2, "say": "torch.OutOfMemoryError: CUDA out of memory.", "exit": 1}),
        stand_in_test("long", {"at": 2, "wait_for": str(go)}),
    ]
    run = start_run(sandbox, tests)
    run.wait_for_step("long", 2)
    watching = run.command("watch", "--html", str(path))
    until("a page", path.exists)
    reader = Reader(browser, path)
    reader.wait_for(f"{TILES} === '1success 1failed 0skipped 1unfinished 0rejected'")

    first = reader.page.evaluate("performance.timeOrigin")
    reader.wait_for(f"performance.timeOrigin !== {first}")  # it has loaded itself again
    reader.pause()
    assert reader.serious() == []
    assert "2 of 3 runs ended" in reader.page.inner_text("#headline")
    steps = reader.page.eval_on_selector_all("#rows td[data-label=steps]", "all => all.map(td => td.innerText)")
    assert sorted(steps) == ["2/5", "2/5", "5/5"]
    links = reader.log_links()
    assert sorted(links) == [f"{name} of {point}/single" for name, point in LOGS]
    assert "MBRIDGE_STEP" in reader.read(links["stdout.txt of long/single"])
    assert "CUDA out of memory" in reader.read(links["stderr.txt of bad/single"])

    reader.page.click("#pause")
    go.touch()
    run.finish(1)
    watching.finish(0)
    reader.wait_for(f"document.getElementById('live') === null && {TILES}.startsWith('2success')")
    assert reader.page.evaluate("JSON.parse(document.getElementById('data').textContent).reload_s") is None
    assert reader.serious() == []
    assert reader.complaints == []
    assert reader.requests == {path.as_uri()}

    final = Reader(browser, run.root / "report.html")
    final.wait_for("document.documentElement.dataset.state === 'ready'")
    assert all(final.read(link) for link in final.log_links().values())
    assert sorted(final.log_links()) == sorted(links)
    assert final.complaints == []


LOGS = [("stderr.txt", "bad"), ("stdout.txt", "bad"), ("stdout.txt", "good"), ("stdout.txt", "long")]


def test_the_last_page_of_a_run_that_nobody_drives(
    start_run: Any, stand_in_test: Any, mbridge: Any, until: Any, sandbox: Any, tmp_path: Path, sentence: Sentence
) -> None:
    """It names what has not ended, and is final; a place that cannot be written is refused at once."""
    path = tmp_path / "live.html"
    told = {"at": 2, "wait_for": str(tmp_path / "go")}
    run = start_run(sandbox, [stand_in_test("long", told)], args=["--detach"]).finish(0)
    watching = run.command("watch", "--html", str(path))
    so_far = "results so far: 0 of 1 run ended; no running process holds this run"
    until("the page", lambda: path.exists() and so_far in path.read_text())
    watching.send(signal.SIGINT)
    watching.finish(0)
    assert so_far in path.read_text()
    assert '"reload_s":null' in path.read_text()
    (tmp_path / "go").touch()
    run.resume().finish(0)
    refused = mbridge("watch", run.root, "--html", tmp_path / "none" / "x.html", env=run.env)
    assert refused.returncode == 2
    sentence(refused.stderr)
    own = (run.root / "report.html").read_bytes()
    assert mbridge("watch", run.root, "--html", run.root / "report.html", env=run.env).returncode == 2
    assert (run.root / "report.html").read_bytes() == own, "it has the history of earlier runs"
