"""The site: it builds without a broken link, has the page of all rules, and is searched from the disk."""

from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.constraints.rule_docs import documents
from tests.report.html.conftest import browser  # noqa: F401

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does: strictly."""
    place = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build = pytest.importorskip("mkdocs.commands.build").build
        load_config = pytest.importorskip("mkdocs.config").load_config
        build(load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(place), strict=True))
    return place


def test_every_page_is_there_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.stem for path in site.glob("*.html")}
    assert pages >= {path.stem for path in (REPOSITORY / "docs").glob("*.md")} | {"rules"}
    assert not [path.name for path in site.glob("*.html") if '<script src="http' in path.read_text()]
    assert not list(site.glob("*.py"))


def test_every_rule_is_on_the_page_of_rules(site: Path) -> None:
    page = (site / "rules.html").read_text()
    assert all(f'<h2 id="{rule_id.lower()}">' in page for rule_id in documents())


@pytest.mark.process
def test_the_site_is_searched_without_a_server(site: Path, browser: Any) -> None:  # noqa: F811
    page, errors = browser.new_page(), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((site / "rules.html").as_uri())
    page.locator("[data-md-component=search-query]").press_sequentially("hang_timeout_s")  # keys start a search
    page.wait_for_selector('.md-search-result__item h1:has-text("Scenarios")', state="attached", timeout=120_000)
    assert errors == []
