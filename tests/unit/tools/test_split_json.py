"""`tools/split_json.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def test_documents_are_divided_by_percent(tmp_path: Path, run: Any) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"text": f"document {n} " * n}) + "\n" for n in range(60)))
    arguments = ("--test-percent", 30, "--dev-percent", 20, "--no-near-duplicates", "--seed", 3)
    done = run("split_json.py", "--input", source, "--output", output, *arguments)
    assert done.returncode == 0
    files = [tmp_path / f"out{part}.jsonl" for part in ("", ".valid", ".test")]
    sizes = [len(file.read_text().splitlines()) for file in files]
    assert sum(sizes) == 60
    assert 20 < sizes[0] < 40
    assert min(sizes) > 4
