"""Prompts and completions on disk."""

import json

import pytest

from neox.errors import GenerationError
from neox.generation.completion import Completion
from neox.generation.prompt_file import read_prompts, write_completions


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def test_one_prompt_a_line(tmp_path):
    assert read_prompts(write(tmp_path, "p.txt", "one\r\n two \n漢\n\n\n")) == ["one", " two ", "漢"]


def test_the_mark_that_some_editors_begin_a_file_with_is_no_text(tmp_path):
    assert read_prompts(write(tmp_path, "p.txt", "\ufeffone\n")) == ["one"]
    assert read_prompts(write(tmp_path, "p.jsonl", '\ufeff{"text": "one"}\n')) == ["one"]


def test_jsonl(tmp_path):
    text = '{"context": "a\\nb"}\n{"prompt": "c", "id": 1}\n{"text": "d"}\n"e"\n'
    assert read_prompts(write(tmp_path, "p.jsonl", text)) == ["a\nb", "c", "d", "e"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "", "holds no prompts"),
        ("p.txt", "\n \n", "holds no prompts"),
        ("p.txt", "a\n\nb\n", r"p.txt:2: empty prompt"),
        ("p.jsonl", '{"text": "a"}\n{"text": \n', r"p.jsonl:2: not JSON"),
        ("p.jsonl", '{"question": "a"}\n', r"p.jsonl:1: no prompt"),
        ("p.jsonl", '{"text": "\\ud800"}\n', r"p.jsonl:1: the prompt holds half"),
        ("p.jsonl", "[" * 100_000, r"p.jsonl:1: not JSON"),
        ("p.jsonl", '{"text": 3}\n[]\n', r"(?s)p.jsonl:1: no prompt.*p.jsonl:2: no prompt"),
    ],
)
def test_bad_files_are_named_with_their_lines(tmp_path, name, text, message):
    with pytest.raises(GenerationError, match=message):
        read_prompts(write(tmp_path, name, text))


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(GenerationError, match="No such file"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GenerationError, match="cannot be read"):
        read_prompts(tmp_path / "b.txt")


def test_completions_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "out.jsonl"
    done = Completion("a", "ü\n", 2, True, 0.5)
    write_completions(path, [done])
    assert json.loads(path.read_text()) == {
        "context": "a",
        "text": "ü\n",
        "length": 2,
        "finished": True,
        "duration": 0.5,
    }

    def failing():
        yield done
        raise GenerationError("no more")

    with pytest.raises(GenerationError, match="no more"):
        write_completions(path, failing())
    assert len(path.read_text().splitlines()) == 1
    assert [p.name for p in path.parent.iterdir()] == ["out.jsonl"]
