"""A headless Chromium that opens reports, and notes what they do that they should not."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cloudai_mbridge.report.html import render_html

_GUARD_MS = 600_000  # against a hang; Playwright's own 30 s are short on a busy machine
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Opened:
    """A page, and its console messages, errors, dialogs and requests."""

    page: Any
    path: Path
    console: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def settle(self) -> None:
        """Wait until everything is drawn."""
        self.page.wait_for_selector("html[data-state=ready]", state="attached")

    def filter(self, text: str) -> None:
        self.page.fill("#text-filter", text)
        self.settle()

    def names(self) -> list[str]:
        return self.page.eval_on_selector_all(
            "#rows tbody th.name", "cells => cells.map(c => (c.querySelector('.hidden') ?? c).textContent)"
        )

    def column(self, name: str) -> list[str]:
        script = """name => {
          const index = [...document.querySelectorAll('#rows thead th')].findIndex(th => th.dataset.column === name);
          return [...document.querySelectorAll('#rows tr[data-run]')].map(tr => tr.children[index].innerText.trim());
        }"""
        return self.page.evaluate(script, name)

    def assert_quiet(self) -> None:
        """Nothing in the console, nothing thrown, nothing popped up, nothing fetched."""
        assert (self.console, self.errors, self.dialogs) == ([], [], [])
        assert self.requests == [self.path.as_uri()]


Open = Callable[..., Opened]


def _give_up(program: str) -> NoReturn:
    """Skip loudly, or fail where a browser was said to be required."""
    if os.environ.get("MBRIDGE_REQUIRE_CHROMIUM"):
        pytest.fail(f"{program} is required and not installed")
    pytest.skip(f"{program} IS NOT INSTALLED".upper())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _give_up("playwright")
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        _give_up("Chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=_GUARD_MS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def show(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Render a report and open it: show(report, history, gate, nodes, width=..., color_scheme=...).

    The pages are tabs of one context, and so of one renderer, which has compiled their scripts.
    """
    context = browser.new_context(reduced_motion="reduce")
    context.set_default_timeout(_GUARD_MS)

    def open_page(
        report: Any,
        history: Any = (),
        gate: Any = None,
        nodes: Any = None,
        *,
        width: int = 1280,
        color_scheme: str = "light",
    ) -> Opened:
        path = tmp_path_factory.mktemp("html") / "report.html"
        path.write_text(render_html(report, history, gate, nodes), encoding="utf-8")
        opened = Opened(context.new_page(), path)
        opened.page.set_viewport_size({"width": width, "height": 900})
        opened.page.emulate_media(color_scheme=color_scheme)
        opened.page.on("console", lambda message: opened.console.append(message.text))
        opened.page.on("pageerror", lambda error: opened.errors.append(str(error)))
        opened.page.on("dialog", lambda dialog: (opened.dialogs.append(dialog.message), dialog.dismiss()))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(path.as_uri())
        opened.settle()
        return opened

    yield open_page
    context.close()
