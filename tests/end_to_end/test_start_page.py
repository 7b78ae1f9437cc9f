"""docs/index.md: a run from own text to an export, as a reader would type it, and the same lines in README.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.pages import ROOT, type_page

PROMPT = "Document 7"


def test_readme_has_the_same_commands() -> None:
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    typed = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[0].splitlines()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = {line.partition("  #")[0].rstrip() for line in readme.splitlines()}
    assert len(typed) == 6
    assert set(typed) <= lines


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with (tmp_path / "data" / "mydata.jsonl").open("w") as file:
        for n in range(3000):
            words = " ".join(str(n * k) for k in range(40))
            file.write(json.dumps({"text": f"Document {n} counts: {words}."}) + "\n")
    whole = type_page("index.md", tmp_path, f"{PROMPT}\n")
    assert "tokens/s]" in whole
    assert "A100 SXM 40 GB" in whole
    assert (tmp_path / "runs" / "my" / "hf" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "my" / "checkpoints" / "latest").read_text() == "global_step200"
