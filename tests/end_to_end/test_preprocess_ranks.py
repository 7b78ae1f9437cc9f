"""The same command through deepy.py and a hostfile makes the bytes of one machine."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VOCAB = ROOT / "tests" / "golden" / "data" / "tokenizer.json"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=120)


def test_two_slots_make_the_bytes_of_one_process(tmp_path: Path) -> None:
    for name, count in (("a", 300), ("b", 200), ("c", 100)):
        texts = (json.dumps({"text": f"document {name} {i} <|endoftext|> naïve"}) + "\n" for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(texts))
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    flags = ["--input", "a.jsonl,b.jsonl,c.jsonl", "--tokenizer-type", "HFTokenizer", "--vocab", str(VOCAB)]
    flags += ["--append-eod", "--workers", "1", "--output-prefix"]
    one = run(tmp_path, str(ROOT / "tools" / "preprocess_data.py"), *flags, "one")
    assert one.returncode == 0, one.stderr
    two = run(tmp_path, str(ROOT / "deepy.py"), "preprocess_data.py", "-H", "hostfile", *flags, "two")
    assert two.returncode == 0, two.stderr
    assert "two_text_document: 600 documents" in two.stdout
    for suffix in ("bin", "idx"):
        files = [tmp_path / f"{name}_text_document.{suffix}" for name in ("one", "two")]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert {p.name for p in tmp_path.glob("two*")} == {f"two_text_document.{s}" for s in ("bin", "idx", "json")}
    (tmp_path / "c.jsonl").write_text("{broken\n")
    failed = run(tmp_path, str(ROOT / "deepy.py"), "preprocess_data", "-H", "hostfile", *flags, "three")
    assert failed.returncode != 0
    assert "c.jsonl:1 (byte 0): not JSON" in failed.stderr + failed.stdout


def test_what_no_rank_could_do_is_said_once_and_nothing_is_left(tmp_path: Path) -> None:
    flags = ["--output-prefix", "out/x", "--tokenizer-type", "CharLevelTokenizer", "--num_gpus", "2"]
    failed = run(tmp_path, str(ROOT / "deepy.py"), "preprocess_data.py", "--input", "none.jsonl", *flags)
    assert failed.returncode == 1
    assert failed.stderr.count("none.jsonl") == 1
    assert list(tmp_path.iterdir()) == []
