"""The first picture of the README in a real browser: its text stays inside its boxes, in wide fonts too."""

import base64
import shutil
from pathlib import Path

import pytest

if shutil.which("chromedriver") is None:
    pytest.skip("chromedriver (Debian: chromium-driver) is not installed", allow_module_level=True)

from tests.end_to_end.browser import browser, call

ROOT = Path(__file__).parents[2]
WIDER = 1.1  # fonts that the machine lacks, such as Verdana, against DejaVu Sans
OUTSIDE = """
document.documentElement.style.fontFamily = "DejaVu Sans, Verdana, sans-serif";
const boxes = [...document.querySelectorAll("g rect")].map((box) => box.getBBox());
const outside = [];
for (const text of document.querySelectorAll("text")) {
  const shape = text.getBBox();
  const middle = shape.x + shape.width / 2;
  const half = (shape.width / 2) * arguments[0];
  const inside = (box) =>
    box.x <= middle - half && middle + half <= box.x + box.width &&
    box.y <= shape.y && shape.y + shape.height <= box.y + box.height;
  if (!boxes.some(inside)) outside.push(text.textContent);
}
return [boxes.length, outside];
"""


def test_text_stays_inside_its_boxes(tmp_path):
    with browser(tmp_path) as session:
        call("POST", f"{session}/url", {"url": (ROOT / "docs/images/overview.svg").as_uri()})
        boxes, outside = call("POST", f"{session}/execute/sync", {"script": OUTSIDE, "args": [WIDER]})
        assert (boxes, outside) == (8, [])
        picture = base64.b64decode(call("GET", f"{session}/screenshot"))
    (tmp_path / "overview.png").write_bytes(picture)
    assert picture.startswith(b"\x89PNG")
