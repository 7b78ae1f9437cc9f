"""The same command through deepy.py and a hostfile makes the bytes of one machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_two_slots_make_the_labels_of_one_process(tmp_path: Path) -> None:
    for name, count in (("a", 20), ("b", 30)):
        chats = (
            [{"role": "user", "content": f"{name} {i}"}, {"role": "assistant", "content": "naïve " * i}]
            for i in range(count)
        )
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    flags = ["--input", "a.jsonl", "b.jsonl", "--vocab-file", str(VOCAB), "--chat-template", "chat.jinja"]
    flags += ["--workers", "1", "--output-prefix"]
    one = run(tmp_path, str(ROOT / "tools" / "preprocess_chat.py"), *flags, "one")
    assert one.returncode == 0, one.stderr
    two = run(tmp_path, str(ROOT / "deepy.py"), "preprocess_chat.py", "--num_gpus", "2", *flags, "two")
    assert two.returncode == 0, two.stderr
    assert "two_messages_document: 50 documents" in two.stdout
    for key in ("messages", "messages_label"):
        for suffix in ("bin", "idx"):
            files = [tmp_path / f"{name}_{key}_document.{suffix}" for name in ("one", "two")]
            assert files[0].read_bytes() == files[1].read_bytes()


def test_what_no_rank_could_do_is_said_once_and_nothing_is_left(tmp_path: Path) -> None:
    flags = ["--output-prefix", "out/x", "--tokenizer-type", "CharLevelTokenizer", "--num_gpus", "2"]
    failed = run(tmp_path, str(ROOT / "deepy.py"), "preprocess_data.py", "--input", "none.jsonl", *flags)
    assert failed.returncode == 2
    assert failed.stderr.count("none.jsonl") == 1
    assert list(tmp_path.iterdir()) == []
