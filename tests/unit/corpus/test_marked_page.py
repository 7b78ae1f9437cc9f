"""HTML as a text, with and without a byte order mark."""

from __future__ import annotations

from pathlib import Path

import pytest

from neox.corpus import read_documents


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_html_is_a_text_too(tmp_path: Path, mark: bytes) -> None:
    page = tmp_path / "page.txt"
    page.write_bytes(mark + b"<html>text</html>")
    assert [document.text for document in read_documents([str(page)])] == ["<html>text</html>"]
