"""Files that a page does not replace."""

from pathlib import Path

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.replace import PAGE_TITLE, require_page
from cloudai_mbridge.report.html import _read
from tests.golden import Sentence


def test_a_page_replaces_a_page_and_nothing_else(tmp_path: Path, sentence: Sentence) -> None:
    path = tmp_path / "x.html"
    require_page(path)
    for good in ("", _read("assets", "page.html")):
        path.write_text(good)
        require_page(path)
    assert PAGE_TITLE in _read("assets", "page.html")
    for other in ("my notes", "<!DOCTYPE html><title>Mine</title>", "\0\1\2"):
        path.write_text(other)
        with pytest.raises(BadInput) as caught:
            require_page(path)
        sentence(caught)
