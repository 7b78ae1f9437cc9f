"""Our tool writes the bytes that gpt-neox v2.0 wrote."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "golden" / "data"


@pytest.mark.parametrize(("workers", "accelerator"), [("1", "off"), ("3", "auto")])
def test_small_text_document(tmp_path: Path, workers: str, accelerator: str) -> None:
    command = [
        *(sys.executable, "tools/preprocess_data.py", "--input", str(DATA / "small.jsonl.zst")),
        *("--output-prefix", str(tmp_path / "small"), "--vocab", str(DATA / "tokenizer.json")),
        *("--tokenizer-type", "HFTokenizer", "--append-eod", "--workers", workers, "--accelerator", accelerator),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for suffix in ("bin", "idx"):
        name = f"small_text_document.{suffix}"
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), name
    assert {path.name for path in tmp_path.iterdir()} == {f"small_text_document.{s}" for s in ("bin", "idx", "json")}
