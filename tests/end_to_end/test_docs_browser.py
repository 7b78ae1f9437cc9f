"""The pages of docs/ in a browser, on a phone and on a laptop: nothing is cut off, and no key is broken in two."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.browser import browser, call

ROOT = Path(__file__).resolve().parents[2]
CUT_OFF = """
const wider = (element) => element.scrollWidth > element.clientWidth + 1;
const found = [];
for (const code of document.querySelectorAll("pre > code")) if (wider(code)) found.push(code.innerText.slice(0, 60));
if (arguments[0])
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap"))
    if (wider(table)) found.push("table " + table.innerText.slice(0, 60));
const lines = (element) => new Set([...element.getClientRects()].map((box) => Math.round(box.top))).size;
for (const word of document.querySelectorAll("td .word")) if (lines(word) > 1) found.push("word " + word.innerText);
if (document.documentElement.scrollWidth > window.innerWidth) found.push("the page");
return found;
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_page_is_cut_off(tmp_path: Path) -> None:
    config = pytest.importorskip("mkdocs.config", reason="mkdocs (requirements/requirements-docs.txt) is not installed")
    if not shutil.which("chromedriver"):
        pytest.skip("chromedriver is not installed: apt install chromium-driver")
    from mkdocs.commands.build import build

    site = tmp_path / "site"
    build(config.load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(site)))
    pages = sorted(page for page in site.rglob("*.html") if page.name != "404.html")
    assert len(pages) > 40
    cut: dict[tuple[str, int], Any] = {}
    with browser(tmp_path) as session:
        for width in (420, 1280):
            call("POST", f"{session}/window/rect", {"width": width, "height": 900})
            for page in pages:
                call("POST", f"{session}/url", {"url": page.as_uri()})
                # on a phone a table of six columns scrolls
                script = {"script": CUT_OFF, "args": [width > 1000]}
                found = call("POST", f"{session}/execute/sync", script)
                if page.name == "models.html":
                    words = call("POST", f"{session}/elements", {"using": "css selector", "value": "td .word"})
                    assert len(words) > 100
                if found:
                    cut[str(page.relative_to(site)), width] = found
    assert not cut
